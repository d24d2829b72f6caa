"""Tail percentiles against NumPy, their intervals against repeated draws."""

import math
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import TailStatistics

GRID_ERROR = 2.5e-4


def requests(
    random: np.random.Generator, count: int, tokens: int, spread: float = 0.0
) -> list[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    """Tokens with acceptance rates of a Beta distribution; `spread` makes the requests differ."""
    made = []
    for index in range(count):
        b = 2.0 * math.exp(spread * random.normal())
        alpha = random.beta(8.0, b, size=tokens)
        made.append((f"request-{index}", random.integers(0, 3, size=tokens), alpha))
    return made


def distinct_clusters(count: int) -> list[str]:
    """Names of prompts of which no two share a cluster."""
    named = {zlib.crc32(str(index).encode()) % 64: str(index) for index in range(2000)}
    return list(named.values())[:count]


class TestTailStatistics:
    def test_percentile_and_mean_equal_numpy_per_bin(self) -> None:
        statistics = TailStatistics()
        made = requests(np.random.default_rng(0), 50, 137)
        for request in made:
            statistics.add(*request)
        bin_of = np.concatenate([item[1] for item in made])
        alpha = np.concatenate([item[2] for item in made])
        for percentile in (5.0, 1.0, 50.0):
            bins = statistics.bins(percentile)
            assert [item.bin for item in bins] == [0, 1, 2]
            for item in bins:
                inside = alpha[bin_of == item.bin]
                positions = (2000 * item.bin, 2000 * item.bin + 2000)
                assert (item.first_position, item.end_position) == positions
                assert item.tokens == len(inside)
                expected = np.percentile(inside, percentile, method="inverted_cdf")
                assert abs(item.tail - expected) <= GRID_ERROR + 1e-12
                assert item.mean == pytest.approx(inside.mean(), rel=1e-12)
        assert statistics.tokens() == {item.bin: item.tokens for item in bins}

    def test_full_agreement_is_exactly_one_and_none_exactly_zero(self) -> None:
        statistics = TailStatistics()
        statistics.add("same", [0] * 30, [1.0] * 30)
        statistics.add("apart", [1] * 30, [0.0] * 30)
        statistics.add("apart", [-1] * 30, [0.5] * 30)
        same, apart = statistics.bins()
        assert (same.tail, same.mean, apart.tail, apart.mean) == (1.0, 1.0, 0.0, 0.0)

    @pytest.mark.parametrize(("clusters", "spread"), [(8, 0.0), (8, 1.0), (20, 0.6), (60, 1.0)])
    def test_confidence_intervals_cover_the_truth(self, clusters: int, spread: float) -> None:
        """They do so also for few prompts, and where the rates of one prompt are alike."""
        reference = np.random.default_rng(99)
        pool = np.concatenate([item[2] for item in requests(reference, 40_000, 20, spread)])
        tail = np.percentile(pool, 5)
        random = np.random.default_rng(7)
        names = distinct_clusters(clusters)
        trials, tail_hits = 400, 0
        for _ in range(trials):
            statistics = TailStatistics()
            made = requests(random, clusters, 60, spread)
            for name, (_, bins, alpha) in zip(names, made, strict=True):
                statistics.add(name, np.zeros_like(bins), alpha)
            (item,) = statistics.bins()
            assert item.tail_low is not None and item.tail_high is not None
            tail_hits += item.tail_low - GRID_ERROR <= tail <= item.tail_high + GRID_ERROR
        # The intervals promise 95 %; the standard deviation of the share over 400 trials is 1.1 %.
        assert 0.91 <= tail_hits / trials <= 0.985

    def test_few_prompts_have_no_interval(self) -> None:
        statistics = TailStatistics()
        names = distinct_clusters(8)
        for name in names[:7]:
            statistics.add(name, np.zeros(100, int), np.linspace(0.5, 1, 100))
        (item,) = statistics.bins()
        assert item.tokens == 700 and item.tail_low is None
        statistics.add(names[7], np.zeros(100, int), np.linspace(0.5, 1, 100))
        assert statistics.bins()[0].tail_low is not None
