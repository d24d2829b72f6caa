"""Token histories by kernels: the same drafts as on a CPU.

As in `test_kernels.py`, the kernels run in Triton's interpreter on a CPU, and compiled on a GPU.
"""

import random
from pathlib import Path

import pytest
import torch
from kernel_step import DEVICES, INTERPRETED, require_passes_interpreted

from sparrow_sglang.plugin.drafting import kernels
from sparrow_sglang.plugin.drafting.histories import Texts, TokenHistories, draft_in_torch


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_the_cases_below_in_tritons_interpreter() -> None:
    require_passes_interpreted(Path(__file__))


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_and_accepted_tokens(device: str) -> None:
    """Texts of few distinct tokens, so that matches of all lengths and equal votes come up."""
    draw = random.Random(0)
    # The longest text fills several blocks of each of its parts.
    lengths = [1, 2, 17, 70, 300, 20_000]
    rows, width = list(range(len(lengths))), max(lengths) + 20
    histories = TokenHistories(len(lengths), width, device)
    texts = [draw.choices(range(draw.randint(2, 9)), k=length) for length in lengths]
    prompts = [b"a", b"a", b"b", b"b", b"a", b"b"]
    histories.start(rows, prompts, texts)
    index = torch.tensor(rows, device=device)
    table = torch.randint(10**6, (len(rows), width), device=device, dtype=torch.int32)
    for _ in range(4):
        on_host = Texts(*(tensor.cpu() for tensor in histories.texts))
        committed = torch.tensor([len(text) - 1 for text in texts], device=device)
        found, positions, slots = kernels.draft(histories.texts, index, 3, committed, table)
        assert torch.equal(found.cpu(), draft_in_torch(on_host, torch.tensor(rows), 3))
        assert torch.equal(positions, committed[:, None] + torch.arange(4, device=device))
        assert torch.equal(slots, table.gather(1, positions).long())
        for one, all_rows in zip(
            kernels.draft(histories.texts, index, 0, committed, table),
            (found, positions, slots),
            strict=True,
        ):
            assert torch.equal(one, all_rows[:, :1])
        # What is sampled is the draft up to one place, or everywhere.
        sampled = torch.cat([found[:, 1:], found[:, :1]], dim=1)
        right = [draw.randint(0, 3) for _ in rows]
        for row, place in enumerate(right):
            sampled[row, place] += place < 3
        counts = kernels.accept(histories.texts, index, found, sampled)
        assert counts.tolist() == [1 + place for place in right]
        for row, text in enumerate(texts):
            text += sampled[row, : counts[row]].tolist()
            place = histories.texts.text_of_row[row]
            assert histories.texts.lengths[place] == len(text)
            assert histories.texts.tokens[place, : len(text)].tolist() == text
