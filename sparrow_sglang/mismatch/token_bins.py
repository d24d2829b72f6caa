"""Which response tokens an acceptance tail counts, and the bin of positions that each belongs to.
Audit, calibration and training count by the same rule, so that their tails can be compared."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow_sglang.schedules.schedule import BudgetSchedule

BIN_TOKENS = 2000
"""Positions per bin under a schedule that has one budget for all lengths."""
NOT_COUNTED = -1

_Tokens = TypeVar("_Tokens", int, NDArray[np.int64])


def token_bins(
    schedule: BudgetSchedule,
    prompt_tokens: int,
    response_tokens: int,
) -> NDArray[np.int64]:
    """The bin of each response token, int64 [response_tokens]; `NOT_COUNTED` where none.

    Only tokens of sparse decode steps count: where the budget holds all cached tokens, decode is
    dense. A token belongs to the bin of the budget that its step has read. Bins are
    `tail_bin_tokens(schedule)` positions wide, and continue beyond the schedule's last one. The
    first token does not count: no decode step has sampled it.
    """
    # The decode step that samples the token at position p attends to p cached tokens.
    cached = np.arange(prompt_tokens, prompt_tokens + response_tokens)
    bins = bins_of_lengths(cached, tail_bin_tokens(schedule), schedule.page_size)
    bins[schedule.tokens_read(cached) == cached] = NOT_COUNTED
    bins[:1] = NOT_COUNTED
    return bins


def tail_bin_tokens(schedule: BudgetSchedule) -> int:
    """Positions per bin of the tails under `schedule`: those of its own bins, if it has several."""
    return schedule.bin_tokens if len(schedule.budget_tokens) > 1 else BIN_TOKENS


def bins_of_lengths(cached: ArrayLike, bin_tokens: int, page_size: int) -> NDArray[np.int64]:
    """Bins of decode steps with `cached` tokens, in their shape. A schedule chooses a step's budget
    by its pages, so lengths count in whole pages."""
    return whole_pages(np.asarray(cached, dtype=np.int64), page_size) // bin_tokens


def whole_pages(tokens: _Tokens, page_size: int) -> _Tokens:
    """`tokens` rounded up to whole pages, in tokens."""
    return -(-tokens // page_size) * page_size
