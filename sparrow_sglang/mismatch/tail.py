"""The lower tail of the acceptance rate: which response tokens count, the bin of positions that
each belongs to, and a percentile per bin, with its interval. Audit, calibration and training count
by the same rule, so that their tails can be compared."""

import zlib
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow_sglang.schedules.schedule import BudgetSchedule

BIN_TOKENS = 2000
"""Positions per bin under a schedule that has one budget for all lengths."""
NOT_COUNTED = -1
TAIL_PERCENTILE = 5.0
MIN_CLUSTERS = 8
"""Clusters from which on there are confidence intervals; of fewer the variance is hardly known."""

_STEPS = 2000
_GROUPS = 64
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


@dataclass(frozen=True)
class BinTail:
    """Acceptance rate of the tokens at positions first_position <= x < end_position. `tail` is the
    percentile and `tail_low` to `tail_high` its confidence interval, None where the tokens come
    from fewer than `MIN_CLUSTERS` clusters. A `tail_low` of 0 or a `tail_high` of 1 says that the
    tokens show no bound on this side."""

    bin: int
    first_position: int
    end_position: int
    tokens: int
    tail: float
    tail_low: float | None
    tail_high: float | None
    mean: float


class TailStatistics:
    """Streaming tail percentile and mean of the acceptance rate per position bin.

    Kept per bin: a histogram over the grid 0, 1/2000, ..., 1, to which each rate is rounded, so
    that percentiles are exact to 2.5e-4 however many tokens came in; and the exact sum. Tokens of
    one prompt resemble each other, so intervals that took them as independent would be too narrow:
    each prompt is hashed into one of 64 clusters with a histogram of its own. About 0.5 MB per bin.
    """

    def __init__(self, bin_tokens: int = BIN_TOKENS) -> None:
        self.bin_tokens = bin_tokens
        self._counts: dict[int, NDArray[np.uint32]] = {}
        self._sums: dict[int, float] = {}

    def add(self, cluster: str, bins: ArrayLike, alpha: ArrayLike) -> None:
        """Count the tokens of one response; `cluster` names its prompt. `bins` [T] are those of
        `token_bins`; `alpha` [T] are acceptance rates. Raises `ValueError` if lengths differ, a bin
        is below -1 or a rate is outside [0, 1]."""
        rates, bin_of_token = _checked_alpha(alpha), np.asarray(bins, dtype=np.int64)
        shapes = bin_of_token.shape, rates.shape
        if rates.ndim != 1 or len({*shapes}) > 1 or (bin_of_token < NOT_COUNTED).any():
            raise ValueError(f"bins, alpha {shapes}: expected [T] and bins >= {NOT_COUNTED}")
        row = zlib.crc32(cluster.encode()) % _GROUPS
        for index in np.unique(bin_of_token[bin_of_token != NOT_COUNTED]).tolist():
            if index not in self._counts:
                self._counts[index] = np.zeros((_GROUPS, _STEPS + 1), dtype=np.uint32)
                self._sums[index] = 0.0
            inside = rates[bin_of_token == index]
            cells = np.rint(inside * _STEPS).astype(np.int64)
            self._counts[index][row] += np.bincount(cells, minlength=_STEPS + 1).astype(np.uint32)
            self._sums[index] += float(inside.sum())

    def tokens(self) -> dict[int, int]:
        """Per filled bin."""
        return {index: int(self._counts[index].sum()) for index in sorted(self._counts)}

    def bins(self, percentile: float = TAIL_PERCENTILE, confidence: float = 0.95) -> list[BinTail]:
        return [self.bin(index, percentile, confidence) for index in sorted(self._counts)]

    def bin(
        self, index: int, percentile: float = TAIL_PERCENTILE, confidence: float = 0.95
    ) -> BinTail:
        """The tail and the mean of a filled bin. The percentile of n tokens is that of rank
        ceil(n * percentile / 100), without interpolation. Its interval is Woodruff's (1952): the
        percentiles at percentile / 100 plus and minus a multiple of the standard error of the share
        of tokens up to the tail. Standard errors are those of the delete-one-cluster jackknife,
        their multiple is a quantile of Student's t, with fewer degrees of freedom where few
        clusters hold most of the variance."""
        filled = self._counts[index].any(axis=1)
        counts = self._counts[index][filled].astype(np.int64)
        tokens = counts.sum(axis=1)
        below = np.cumsum(counts.sum(axis=0))
        total = int(below[-1])
        cell = _cell(below, percentile / 100)
        tail_low = tail_high = None
        if len(tokens) >= MIN_CLUSTERS:
            error = _error_of_ratio(counts[:, : cell + 1].sum(axis=1), tokens, confidence)
            low, high = percentile / 100 - error, percentile / 100 + error
            tail_low = _cell(below, low) / _STEPS if low > 0 else 0.0
            tail_high = _cell(below, high) / _STEPS if high < 1 else 1.0
        return BinTail(
            bin=index,
            first_position=index * self.bin_tokens,
            end_position=(index + 1) * self.bin_tokens,
            tokens=total,
            tail=cell / _STEPS,
            tail_low=tail_low,
            tail_high=tail_high,
            mean=self._sums[index] / total,
        )


def _cell(below: NDArray[np.int64], share: float) -> int:
    """The cell of the histogram with cumulative counts `below` that holds this share's token."""
    return int(np.searchsorted(below, max(1, ceil(share * below[-1]))))


def _error_of_ratio(values: NDArray[Any], tokens: NDArray[np.int64], confidence: float) -> float:
    """Half the width of the confidence interval of sum(values) / sum(tokens), both per cluster."""
    from scipy.special import stdtrit

    clusters, total = len(tokens), tokens.sum()
    residuals = (values - values.sum() / total * tokens) / (total - tokens)
    squares = residuals**2
    if not squares.any():
        return 0.0
    error = sqrt((clusters - 1) / clusters * squares.sum())
    # Where few clusters hold most of the variance, it is known badly. Of normal residuals, whose
    # kurtosis is 3, this is half the usual number: the kurtosis of few clusters comes out too low.
    kurtosis = clusters * (squares**2).sum() / squares.sum() ** 2
    freedom = min(clusters - 1, 1.5 * clusters / kurtosis)
    return error * float(stdtrit(freedom, (1 + confidence) / 2))


def _checked_alpha(alpha: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(alpha, dtype=np.float64)
    # Written so that NaN fails too; a sum of probabilities may round past 1.
    wrong = values[~((values >= 0) & (values <= 1 + 1e-5))]
    if wrong.size:
        raise ValueError(f"alpha holds {wrong[0]}: expected rates between 0 and 1")
    return np.minimum(values, 1.0)
