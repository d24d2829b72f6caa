"""Which tokens a tail counts, against a sparse step written out page by page."""

import pytest

from sparrow_sglang.mismatch.tail import BIN_TOKENS, token_bins
from sparrow_sglang.schedules.schedule import BudgetSchedule

GROWING = BudgetSchedule(
    name="growing", page_size=16, bin_tokens=128, budget_tokens=(64, 64, 160, 4096)
)


@pytest.mark.parametrize("schedule", [GROWING, BudgetSchedule.fixed(96, 32)])
@pytest.mark.parametrize("prompt", [1, 60, 100, 130, 250])
def test_only_sparse_decode_steps_count_in_the_bin_whose_budget_they_read(schedule, prompt):
    width = BIN_TOKENS if len(schedule.budget_tokens) == 1 else schedule.bin_tokens
    bins = token_bins(schedule, prompt, 600)
    assert len(bins) == 600
    assert bins[0] == -1, "the first token comes from prefill"
    for index in range(1, 600):
        cached = prompt + index
        pages = -(-cached // schedule.page_size)
        budget = schedule.budget_at(cached) // schedule.page_size
        expected = pages * schedule.page_size // width if pages > budget else -1
        assert bins[index] == expected, index
