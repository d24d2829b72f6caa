"""The distribution of acceptance rates over tokens, and its correlation with position.

In: generations with the acceptance rates of their tokens. Out: means, tails, fits of a Beta
distribution and correlations, with 95 % intervals by a bootstrap over prompts, as tokens of one
prompt resemble each other. Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sparrow_sglang.calibration.choice import Tokens
from sparrow_sglang.mismatch.tail import TAIL_PERCENTILE

AGREEMENT = 0.999
"""Rates above this belong to tokens on which both sides agree, not to the tail."""
EDGES = (
    *(round(0.05 * i, 2) for i in range(19)),
    *(0.92, 0.94, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975),
    *(AGREEMENT, 0.9995, 0.9999, 1.0),
)
"""Histogram edges; a cell holds rates above one edge and up to the next, the first also 0."""

_CONFIDENCE_ENDS = (2.5, 97.5)
_MIN_FIT_TOKENS = 20
_DRAWN_AT_ONCE = 2**24

Draws = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value with its interval, None where the tokens come from fewer than two prompts."""

    value: float
    low: float | None
    high: float | None

    def fields(self, name: str) -> dict[str, float | None]:
        """The estimate as three fields of a row."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class BetaFit(NamedTuple):
    """Beta(a, b) scaled to [0, AGREEMENT], and its Kolmogorov-Smirnov distance to the tokens."""

    a: float
    b: float
    ks: float
    tokens: int


@dataclass(frozen=True)
class Sample:
    """Tokens, all arrays [T].

    Attributes:
        cached: tokens in the KV cache at each step, int64.
        rates: acceptance rates, float64.
        prompts: index of the prompt that each token follows, int64.
    """

    cached: NDArray[np.int64]
    rates: NDArray[np.float64]
    prompts: NDArray[np.int64]

    @classmethod
    def of(cls, generations: Sequence[Tokens], names: Sequence[str]) -> Self:
        """All tokens of these generations; `names` are those of the prompts, by index."""
        index = {name: i for i, name in enumerate(names)}
        prompts = [np.full(len(each.rates), index[each.prompt]) for each in generations]
        # np.concatenate needs at least one array.
        none = np.zeros(0)
        return cls(
            np.concatenate([none, *(each.cached for each in generations)]).astype(np.int64),
            np.concatenate([none, *(each.rates for each in generations)]),
            np.concatenate([none, *prompts]).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.rates)

    def where(self, mask: NDArray[np.bool_]) -> "Sample":
        """The tokens for which `mask` [T] holds."""
        return Sample(self.cached[mask], self.rates[mask], self.prompts[mask])

    def bins(self, bin_tokens: int, page_size: int) -> "dict[int, Sample]":
        """Tokens by schedule bin; a step belongs to the bin of ceil(cached / page_size) pages."""
        index = -(-self.cached // page_size) * page_size // bin_tokens
        return {int(each): self.where(index == each) for each in np.unique(index)}


def span(index: int, bin_tokens: int) -> dict[str, int]:
    """A bin's number and positions, as fields of a row."""
    return {
        "bin": index,
        "first_position": index * bin_tokens,
        "end_position": (index + 1) * bin_tokens,
    }


def histogram(rates: NDArray[np.float64]) -> list[int]:
    """Number of rates in each cell of EDGES."""
    cells = np.clip(np.searchsorted(EDGES, rates, side="left") - 1, 0, None)
    counts: list[int] = np.bincount(cells, minlength=len(EDGES) - 1).tolist()
    return counts


def fit_beta(rates: NDArray[np.float64]) -> BetaFit | None:
    """Maximum-likelihood Beta distribution of the rates [T] at or below AGREEMENT.

    The rates are divided by AGREEMENT and fitted on [0, 1]. The fit is None with fewer than 20
    tokens, or if all rates are equal.
    """
    tail = rates[rates <= AGREEMENT] / AGREEMENT
    if tail.size < _MIN_FIT_TOKENS or tail.min() == tail.max():
        return None
    # The likelihood has no maximum if a value lies at an end of the interval.
    tail = np.clip(tail, 1e-6, 1 - 1e-6)
    a, b, _, _ = stats.beta.fit(tail, floc=0, fscale=1)
    ks = stats.kstest(tail, stats.beta(a, b).cdf).statistic
    return BetaFit(float(a), float(b), float(ks), tail.size)


class Bootstrap:
    """Bootstrap over prompts: draws with replacement, the same draws for all samples.

    A percentile of n tokens is the ceil(n * 5 / 100)-th smallest, as in `mismatch.tail`.
    """

    def __init__(self, prompts: int, resamples: int = 1000, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        weights = draw.multinomial(prompts, [1 / prompts] * prompts, size=resamples)
        self._weights = weights.astype(np.int32)

    def mean(self, sample: Sample, values: NDArray[np.floating | np.bool_]) -> Estimate:
        """Mean of `values` [T] of the tokens."""
        return _estimate([sample], float(values.mean()), self._means(sample, values))

    def tail(self, sample: Sample) -> Estimate:
        """5th percentile of the rates."""
        return _estimate([sample], tail(sample.rates), self._tails(sample))

    def correlation(self, sample: Sample) -> Estimate | None:
        """Pearson correlation of the tokens' positions and rates; None if either does not vary."""
        # Centre the values first: sums of squares of raw positions would cancel.
        x = (sample.cached - sample.cached.mean()) / 1024
        y = sample.rates - sample.rates.mean()
        moments = np.stack([np.ones_like(y), x, y, x * x, y * y, x * y])
        of_prompts = np.stack([self._sums(sample, moment) for moment in moments])
        value = _pearson_of_sums(moments.sum(axis=1)[:, None])[0]
        if not np.isfinite(value):
            return None
        draws = _pearson_of_sums(of_prompts @ self._weights.T.astype(float))
        return _estimate([sample], float(value), draws)

    def correlation_of_bins(
        self, bins: Sequence[Sample], positions: Sequence[float]
    ) -> tuple[Estimate, Estimate] | None:
        """Pearson correlations of the bins' positions with their tails, and with their means.

        The result is None with fewer than three bins, or if the values do not vary.
        """
        if len(bins) < 3:
            return None
        found = []
        for values, draws in (
            ([tail(each.rates) for each in bins], [self._tails(each) for each in bins]),
            (
                [each.rates.mean() for each in bins],
                [self._means(each, each.rates) for each in bins],
            ),
        ):
            value = _pearson(np.array(positions), np.array(values)[None])[0]
            if not np.isfinite(value):
                return None
            drawn = _pearson(np.array(positions), np.stack(draws, axis=1))
            found.append(_estimate(bins, float(value), drawn))
        return found[0], found[1]

    def tail_difference(self, pairs: Sequence[tuple[Sample, Sample]]) -> Estimate:
        """Mean over bins of the first sample's tail minus the second's, on the same prompts."""
        values = [tail(first.rates) - tail(second.rates) for first, second in pairs]
        draws = [self._tails(first) - self._tails(second) for first, second in pairs]
        samples = [sample for pair in pairs for sample in pair]
        return _estimate(samples, float(np.mean(values)), np.mean(draws, axis=0))

    def _sums(self, sample: Sample, values: NDArray[np.floating | np.bool_]) -> Draws:
        """Sum over each prompt's tokens, [prompts]."""
        sums = np.bincount(sample.prompts, values, minlength=self._weights.shape[1])
        return sums.astype(np.float64)

    def _means(self, sample: Sample, values: NDArray[np.floating | np.bool_]) -> Draws:
        """Mean in each draw, [R]; NaN in a draw without tokens."""
        totals = self._weights @ self._sums(sample, values)
        with np.errstate(invalid="ignore"):
            return np.asarray(totals / (self._weights @ self._sums(sample, np.ones(len(sample)))))

    def _tails(self, sample: Sample) -> Draws:
        """Tail in each draw, [R]; NaN in a draw without tokens."""
        order = np.argsort(sample.rates, kind="stable")
        rates, prompts = sample.rates[order], sample.prompts[order]
        rows = max(1, _DRAWN_AT_ONCE // len(rates))
        found = np.empty(len(self._weights))
        for start in range(0, len(found), rows):
            block = slice(start, start + rows)
            below = np.cumsum(self._weights[block][:, prompts], axis=1, dtype=np.int32)
            rank = np.maximum(1, np.ceil(below[:, -1] * TAIL_PERCENTILE / 100))
            place = np.minimum((below < rank[:, None]).sum(axis=1), len(rates) - 1)
            found[block] = np.where(below[:, -1] > 0, rates[place], np.nan)
        return found


def tail(rates: NDArray[np.float64]) -> float:
    """5th percentile of rates [T]."""
    return float(np.percentile(rates, TAIL_PERCENTILE, method="inverted_cdf"))


def _estimate(samples: Sequence[Sample], value: float, draws: Draws) -> Estimate:
    usable = draws[np.isfinite(draws)]
    prompts = np.unique(np.concatenate([each.prompts for each in samples]))
    if prompts.size < 2 or not usable.size:
        return Estimate(value, None, None)
    low, high = map(float, np.percentile(usable, _CONFIDENCE_ENDS))
    return Estimate(value, low, high)


def _pearson(x: NDArray[np.floating], y: Draws) -> Draws:
    """Pearson correlation of x [B] and each row of y [R, B]; NaN where either does not vary."""
    around_x, around_y = x - x.mean(), y - y.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt((around_x**2).sum() * (around_y**2).sum(axis=1))
        return np.asarray((around_x * around_y).sum(axis=1) / spread)


def _pearson_of_sums(sums: Draws) -> Draws:
    """Pearson correlation from sums of 1, x, y, x², y², xy, [6, R]; NaN if either is constant."""
    count, x, y, xx, yy, xy = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt((xx - x * x / count) * (yy - y * y / count))
        return np.asarray((xy - x * y / count) / spread)
