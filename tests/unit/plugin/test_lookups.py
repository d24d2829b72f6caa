"""Tokens that are looked up, against a search of Python lists."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sparrow_sglang.plugin.lossless import lookups
from sparrow_sglang.plugin.lossless.lookups import LONGEST_MATCH, Histories


def request(rid: str, prompt: list[int], output: list[int] = (), **fields: Any) -> Any:
    known = {"origin_input_ids": list(prompt), "output_ids": list(output)}
    neutral = {"extra_key": None, "cache_salt": None}
    return SimpleNamespace(rid=rid, **known | neutral | fields)


def searched(own: list[int], others: list[list[int]], prompt: int, count: int) -> list[int]:
    """What followed the longest text that ends as `own` does; in `own` at its latest place, else in
    an answer of `others`, of which the latest place counts, then the last of them."""
    found = []
    for rank, text in enumerate([own, *others]):
        for place in range(prompt if rank else 1, len(text)):
            length = 0
            while length < min(LONGEST_MATCH, place, len(own)):
                if text[place - 1 - length] != own[-1 - length]:
                    break
                length += 1
            if length:
                found.append((length, rank == 0, place, rank, text[place:]))
    if not found:
        return [0] * count
    *_, followed = max(found)
    return (followed * count)[:count]


def test_proposals_follow_the_longest_match() -> None:
    """Short alphabets, so that places tie; running siblings, a finished one, another prompt."""
    draw, seeded = random.Random(0), torch.Generator().manual_seed(0)
    for alphabet in (2, 3, 40):
        histories = Histories(requests=8, longest=64, device="cpu")
        prompt, other = ([draw.randrange(alphabet) for _ in range(9)] for _ in range(2))
        answers = [[draw.randrange(alphabet) for _ in range(draw.randrange(1, 30))] for _ in "abcd"]
        reqs = [request(str(i), prompt if i < 3 else other) for i in range(4)]
        histories.prefilled(reqs, torch.tensor([answer[0] for answer in answers]))
        for req, answer in zip(reqs, answers, strict=True):
            rows = histories.sources([req], 64).histories
            written = torch.tensor([len(req.origin_input_ids)])
            rest = torch.tensor([answer[1:]], dtype=torch.int64)
            histories.record(rows, written, rest, torch.tensor([len(answer) - 2]))
        # The first request has finished.
        running = reqs[1:]
        sources = histories.sources(running, 64)
        for further in (0, 2):
            drafts = torch.randint(alphabet, (further, 3), generator=seeded)
            if further:
                lengths = histories.lengths[sources.histories.long()]
                histories.record(sources.histories, lengths - 1, drafts.T)
            out = torch.full((5, 3), -1)
            histories.look_up(sources, further, out)
            texts = [p + a for p, a in zip([prompt] * 3 + [other], answers, strict=True)]
            for i, own in enumerate(texts[1:], start=1):
                own = own + [int(token) for token in drafts[:, i - 1]]
                ranks = sources.others[i - 1, 1:].tolist()
                rows = (int(histories._of_rid[req.rid]) for req in reqs)
                by_row = dict(zip(rows, texts, strict=True))
                siblings = [by_row[row] for row in ranks if row >= 0]
                assert len(siblings) == (2 if i < 3 else 0)
                expected = searched(own, siblings, len(prompt), 5)
                assert out[:, i - 1].tolist() == expected, (alphabet, further, i)


def test_chunks_and_retraction_leave_what_was_written() -> None:
    histories = Histories(requests=2, longest=32, device="cpu")
    req = request("a", [1, 2, 3, 4])
    # The token after a chunk that is not the last means nothing.
    for garbage in (9, 5):
        histories.prefilled([req], torch.tensor([garbage]))
    row = int(histories.sources([req], 8).histories[0])
    assert histories.tokens[row, : histories.lengths[row]].tolist() == [1, 2, 3, 4, 5]
    histories.record(torch.tensor([row]), torch.tensor([4]), torch.tensor([[6, 7, 8]]))
    req.output_ids = [5, 6]
    histories.prefilled([req], torch.tensor([7]))
    assert histories.tokens[row, : histories.lengths[row]].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_texts_of_other_prompts_and_tenants_are_not_searched() -> None:
    histories = Histories(requests=8, longest=32, device="cpu")
    reqs = [
        request("a", [1, 2]),
        request("b", [1, 2]),
        request("c", [1, 3]),
        request("d", [1, 2], extra_key="tenant"),
        request("e", [1, 2], cache_salt="tenant"),
        # The id of a request that has ended, with another prompt of the same length.
        request("b", [7, 8]),
    ]
    for req in reqs:
        histories.prefilled([req], torch.tensor([5]))
    seen = histories.sources([reqs[i] for i in (0, 2, 3, 4, 5)], 32)
    shared = [sum(row >= 0 for row in others) for others in seen.others.tolist()]
    assert shared == [2, 1, 1, 1, 1]


def test_histories_of_running_requests_outlive_those_of_finished_ones(monkeypatch: Any) -> None:
    monkeypatch.setattr(lookups, "_KEPT", 2)
    histories = Histories(requests=3, longest=16, device="cpu")
    running = [request("x", [1]), request("y", [2])]
    histories.prefilled(running, torch.tensor([3, 4]))
    for number in range(20):
        brief = request(str(number), [5])
        histories.prefilled([brief], torch.tensor([6]))
        histories.sources([*running, brief], 16)
        histories.sources(running, 16)
    rows = histories.sources(running, 16).histories.long()
    assert histories.tokens[rows, :2].tolist() == [[1, 3], [2, 4]]
    # The latest finished ones of a prompt are kept, as many as fit.
    last = request("last", [5])
    histories.prefilled([last], torch.tensor([6]))
    assert (histories.sources([*running, last], 16).others[2] >= 0).sum() == 3


def test_no_text_is_left_after_times_were_taken() -> None:
    histories = Histories(requests=2, longest=16, device="cpu")
    sources = histories.timed(2, 8)
    histories.look_up(sources, 0, torch.zeros(3, 2, dtype=torch.int64))
    histories.clear()
    req = request("a", [1, 2, 3, 2])
    histories.prefilled([req], torch.tensor([3]))
    out = torch.full((3, 1), -1)
    histories.look_up(histories.sources([req], 16), 0, out)
    assert out[:, 0].tolist() == [2, 3, 2]
    assert np.array_equal(sorted(set(histories.lengths.tolist())), [0, 5])
