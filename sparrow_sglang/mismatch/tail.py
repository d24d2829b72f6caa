"""The lower tail of the acceptance rate over tokens: a percentile per position bin.

In: acceptance rates of tokens, with their bins and the prompt they came from. Out: tail
percentile and mean per bin with confidence intervals, mergeable over workers. Imports neither torch
nor SGLang.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow_sglang.mismatch.token_bins import BIN_TOKENS, NOT_COUNTED

TAIL_PERCENTILE = 5.0

_STEPS = 2000
_GROUPS = 64


@dataclass(frozen=True)
class BinTail:
    """Acceptance rate of the tokens at positions first_position <= x < end_position.

    `tail` is the percentile and `tail_low` to `tail_high` its confidence interval, likewise for
    `mean`; the intervals are None where the tokens come from fewer than two groups of requests.
    """

    bin: int
    first_position: int
    end_position: int
    tokens: int
    tail: float
    tail_low: float | None
    tail_high: float | None
    mean: float
    mean_low: float | None
    mean_high: float | None


class TailStatistics:
    """Streaming tail percentile and mean of the acceptance rate per position bin.

    Kept per bin: a histogram over the grid 0, 1/2000, ..., 1, to which each rate is rounded, so
    that percentiles are exact to 2.5e-4 however many tokens came in; and the exact sum. Tokens of
    one request resemble each other, so a bootstrap over tokens would promise too narrow an
    interval: each request is hashed into one of 64 groups with a histogram of its own, and the
    bootstrap draws groups. Equal requests fall into equal groups on every worker, so merging gives
    what one instance would have counted. About 0.5 MB per bin.
    """

    def __init__(self, bin_tokens: int = BIN_TOKENS) -> None:
        """Raises `ValueError` if `bin_tokens`, the positions per bin, is below 1."""
        if bin_tokens < 1:
            raise ValueError(f"bin_tokens={bin_tokens}: expected 1 or more positions per bin")
        self.bin_tokens = bin_tokens
        self._counts: dict[int, NDArray[np.uint32]] = {}
        self._sums: dict[int, NDArray[np.float64]] = {}

    def add(self, cluster: str, bins: ArrayLike, alpha: ArrayLike) -> None:
        """Count the tokens of one response.

        Args:
            cluster: names the prompt; all samples of a prompt resemble each other.
            bins: [T], as `token_bins` gives them; tokens with `NOT_COUNTED` are left out.
            alpha: [T], acceptance rates, exact or bounds, but one kind in one instance.

        Raises:
            ValueError: lengths differ, a bin is below -1 or a rate is outside [0, 1].
        """
        rates = _checked_alpha(alpha)
        of_tokens = np.asarray(bins, dtype=np.int64)
        if of_tokens.shape != rates.shape or (of_tokens < NOT_COUNTED).any():
            raise ValueError(
                f"bins {of_tokens.shape} and alpha {rates.shape}: expected one bin for each"
                f" acceptance rate, or {NOT_COUNTED} for a token that does not count"
            )
        group = zlib.crc32(cluster.encode()) % _GROUPS
        for index in np.unique(of_tokens[of_tokens != NOT_COUNTED]):
            counts, sums = self._bin(int(index))
            inside = rates[of_tokens == index]
            cells = np.rint(inside * _STEPS).astype(np.int64)
            counts[group] += np.bincount(cells, minlength=_STEPS + 1).astype(np.uint32)
            sums[group] += inside.sum()

    def merge(self, other: "TailStatistics") -> None:
        """Take over the tokens of `other`, which must have the same `bin_tokens`."""
        if other.bin_tokens != self.bin_tokens:
            raise ValueError(
                f"bin_tokens={other.bin_tokens} cannot be merged into bins of {self.bin_tokens}:"
                " expected equal bins; make both with the same bin_tokens"
            )
        for index in other._counts:
            counts, sums = self._bin(index)
            counts += other._counts[index]
            sums += other._sums[index]

    def tokens(self) -> dict[int, int]:
        """Number of tokens per filled bin."""
        return {index: int(self._counts[index].sum()) for index in sorted(self._counts)}

    def bins(
        self,
        percentile: float = TAIL_PERCENTILE,
        confidence: float = 0.95,
        resamples: int = 1000,
        seed: int = 0,
    ) -> list[BinTail]:
        """One `BinTail` per filled bin, by position.

        The percentile of n tokens is the ceil(n * percentile / 100)-th smallest, without
        interpolation. The intervals are the middle `confidence` of `resamples` bootstrap draws of
        groups, reproducible by `seed`.
        """
        if not 0 < percentile < 100 or not 0 < confidence < 1:
            raise ValueError(
                f"percentile={percentile}, confidence={confidence}: expected a percentile between"
                " 0 and 100 and a confidence between 0 and 1, both exclusive"
            )
        return [
            self._summary(index, percentile, confidence, resamples, seed)
            for index in sorted(self._counts)
        ]

    def _bin(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        """Counts [groups, cells] and sums [groups] of a bin, made at its first token."""
        if index not in self._counts:
            self._counts[index] = np.zeros((_GROUPS, _STEPS + 1), dtype=np.uint32)
            self._sums[index] = np.zeros(_GROUPS)
        return self._counts[index], self._sums[index]

    def _summary(
        self, index: int, percentile: float, confidence: float, resamples: int, seed: int
    ) -> BinTail:
        filled = self._counts[index].any(axis=1)
        counts = self._counts[index][filled].astype(np.float64)
        sums = self._sums[index][filled]
        whole = counts.sum(axis=0, keepdims=True)
        tail_low = tail_high = mean_low = mean_high = None
        groups = len(counts)
        if groups > 1:
            # One stream per bin, so that a bin's interval does not depend on which others exist.
            draw = np.random.default_rng([seed, index])
            weights = draw.multinomial(groups, [1 / groups] * groups, size=resamples).astype(float)
            drawn = weights @ counts
            ends = [50 * (1 - confidence), 50 * (1 + confidence)]
            tail_low, tail_high = map(
                float, np.percentile(_grid_percentile(drawn, percentile), ends)
            )
            means = weights @ sums / drawn.sum(axis=1)
            mean_low, mean_high = map(float, np.percentile(means, ends))
        return BinTail(
            bin=index,
            first_position=index * self.bin_tokens,
            end_position=(index + 1) * self.bin_tokens,
            tokens=int(whole.sum()),
            tail=float(_grid_percentile(whole, percentile)[0]),
            tail_low=tail_low,
            tail_high=tail_high,
            mean=float(sums.sum() / whole.sum()),
            mean_low=mean_low,
            mean_high=mean_high,
        )


def _grid_percentile(counts: NDArray[np.float64], percentile: float) -> NDArray[np.float64]:
    """Percentile per row of histograms [R, cells] with whole counts."""
    below = np.cumsum(counts, axis=1)
    rank = np.maximum(1, np.ceil(below[:, -1] * percentile / 100))
    return (below < rank[:, None]).sum(axis=1) / _STEPS


def _checked_alpha(alpha: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(alpha, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"alpha has the shape {values.shape}: expected one rate per token [T]")
    # Written so that NaN fails too; a sum of probabilities may round past 1.
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1 + 1e-5)))
    if wrong.size:
        raise ValueError(
            f"alpha[{wrong[0]}]={values[wrong[0]]}: expected acceptance rates between 0 and 1"
        )
    return np.minimum(values, 1.0)
