"""Drafts from earlier text, and which servers and requests may use them."""

import math
import random
from collections import Counter

import pytest
import torch
from engines import save_tiny_model

from sparrow_sglang.plugin.drafting.histories import (
    LONGEST,
    PARTS,
    SHORTEST,
    SIBLINGS,
    TokenHistories,
    draft_in_torch,
)
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.sglang_arguments import resolved

VOCAB = 7


def drafted(own: list[int], others: list[list[int]], count: int) -> list[int]:
    """The drafts of a request that has said `own`, and whose siblings have said `others`."""
    # By length of the match: text, place and part of each.
    matches: dict[int, dict[tuple[int, int], int]] = {}
    sources = [own, *others]
    for number, source in enumerate(sources):
        for end in range(len(source) - 1):
            agree = 0
            while agree < min(LONGEST, end + 1, len(own)) and (
                source[end - agree] == own[len(own) - 1 - agree]
            ):
                agree += 1
            part = end // math.ceil(len(source) / PARTS)
            matches.setdefault(agree, {})[number, part] = end
    best = max(matches, default=0)
    voters = matches[best] if best >= SHORTEST else {}
    drafts = [own[-1]]
    for ahead in range(1, 1 + count):
        voters = {at: end for at, end in voters.items() if end + ahead < len(sources[at[0]])}
        votes = Counter(sources[at[0]][end + ahead] for at, end in voters.items())
        most = [token for token, number in votes.items() if number == max(votes.values())]

        def latest(token: int, voters=voters, ahead=ahead) -> tuple[int, int]:
            return max(
                (-at[0], at[1])
                for at, end in voters.items()
                if sources[at[0]][end + ahead] == token
            )

        drafts.append(max(most, key=latest) if most else drafts[-1])
        voters = {
            at: end for at, end in voters.items() if sources[at[0]][end + ahead] == drafts[-1]
        }
    return drafts


@pytest.mark.parametrize("seed", range(20))
def test_drafts_follow_the_longest_match_and_the_most_votes(seed):
    draw = random.Random(seed)
    prompts = [b"a", b"b", b"a", b"a", b"a"]
    texts = [
        draw.choices(range(VOCAB - draw.randint(0, 4)), k=draw.randint(1, 60)) for _ in prompts
    ]
    histories = TokenHistories(8, 120, "cpu")
    rows = draw.sample(range(8), len(prompts))
    # All but the last tokens at first, and those as drafts that were right.
    at_first = [text[: max(1, len(text) - 8)] for text in texts]
    histories.start(rows, prompts, at_first)
    index = torch.tensor(rows)
    for place, (text, start) in enumerate(zip(texts, at_first, strict=True)):
        if rest := text[len(start) :]:
            drafts = torch.tensor([[start[-1], *rest[:-1]]])
            counts = histories.accept(index[place : place + 1], drafts, torch.tensor([rest]))
            assert counts == len(rest)
    found = draft_in_torch(histories.texts, index, 3)
    for place, text in enumerate(texts):
        siblings = [
            other for at, other in enumerate(texts) if at != place and prompts[at] == prompts[place]
        ]
        assert found[place].tolist() == drafted(text, siblings, 3)


def test_what_is_sampled_ends_the_drafts():
    histories = TokenHistories(3, 20, "cpu")
    histories.start([0, 1, 2], [b"a", b"b", b"c"], [[1], [1], [1]])
    rows, drafts = torch.arange(3), torch.tensor([[1, 2, 3]]).expand(3, -1)
    sampled = torch.tensor([[5, 3, 4], [2, 5, 4], [2, 3, 4]])
    assert histories.accept(rows, drafts, sampled).tolist() == [1, 2, 3]
    assert draft_in_torch(histories.texts, rows, 0).flatten().tolist() == [5, 5, 4]


def test_a_finished_request_is_remembered_until_its_room_is_needed():
    histories = TokenHistories(2, 20, "cpu")
    histories.start([0], [b"a"], [[1, 2, 3]])
    histories.start([0], [b"b"], [[1, 2, 4]])
    histories.start([0], [b"a"], [[0, 1, 2]])

    def draft() -> int:
        return int(draft_in_torch(histories.texts, torch.tensor([0]), 1)[0, 1])

    assert draft() == 3
    histories.start([1], [b"c"], [[1, 2, 5]])
    assert draft() == 3
    histories.start([1], [b"c"], [[1, 2, 6]])
    # The last token again, for want of a place that matches.
    assert draft() == 2
    histories.start([1], [b"a"], [[1, 2, 5]])
    assert draft() == 5
    histories.clear()
    histories.start([0], [b"a"], [[0, 1, 2]])
    assert draft() == 2


def test_more_siblings_than_a_request_reads():
    histories = TokenHistories(SIBLINGS + 3, 20, "cpu")
    rows = list(range(SIBLINGS + 3))
    texts = [[1, 2, 3], [1, 2, 3], *[[1, 2, 4]] * SIBLINGS, [0, 1, 2]]
    histories.start(rows, [b"a"] * len(rows), texts)
    assert draft_in_torch(histories.texts, torch.tensor(rows[-1:]), 1).tolist() == [[2, 4]]


def test_arguments_of_a_server_with_drafts(make_args):
    view = resolved(make_args(sparrow_draft_tokens=3))
    # SGLang counts the token before the drafts, too.
    assert (view.speculative_algorithm, view.speculative_num_draft_tokens) == ("NGRAM", 4)
    assert resolved(make_args()).speculative_algorithm is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparrow_draft_tokens": 16}, "sparrow_draft_tokens=16: expected 0, for none, to 15"),
        ({"sparrow_draft_tokens": -1}, "sparrow_draft_tokens=-1: expected"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm='NGRAM': its drafts"),
        ({"enable_deterministic_inference": True, "sparrow_draft_tokens": 1}, "remove one of them"),
        ({"attention_backend": "torch_native", "sparrow_schedule": None, "sparrow_draft_tokens": 1},
         "would decode densely"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_servers_that_are_refused(make_args, fields, message):
    with pytest.raises(ValueError, match=message):
        make_args(**fields)


def test_models_and_schedules_that_are_refused(make_args, tmp_path):
    with pytest.raises(ValueError, match="a verification does not serve sliding windows"):
        make_args(save_tiny_model(tmp_path / "gemma3", "gemma3"), sparrow_draft_tokens=1)
    one_page = BudgetSchedule.fixed(512).model_copy(update={"recent_pages": 1, "name": "one"})
    one_page.save(path := tmp_path / "one.json")
    with pytest.raises(ValueError, match="sparrow_draft_tokens=1: schedule one .* at most 0"):
        make_args(sparrow_schedule=str(path), sparrow_draft_tokens=1)


def test_other_versions_of_sglang_are_refused(make_args, monkeypatch):
    monkeypatch.setattr("sparrow_sglang.plugin.drafting.checks.installed_version", lambda: "0.5.20")
    with pytest.raises(ValueError, match=r"in SGLang 0.5.20: fitted to 0.5.23; remove"):
        make_args(sparrow_draft_tokens=1)
