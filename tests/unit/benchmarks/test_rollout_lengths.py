"""Response lengths and requests of `sparrow bench rollout`."""

import math
import statistics

import numpy as np
import pytest

from sparrow_sglang.benchmarks.rollouts.lengths import SIGMA, synthetic_lengths
from sparrow_sglang.benchmarks.rollouts.requests import make_requests


@pytest.mark.parametrize(("count", "mean"), [(8, 1), (16, 500), (64, 8192), (128, 30000)])
def test_synthetic_lengths_have_their_mean_and_stop_at_the_cut_off(count: int, mean: int) -> None:
    lengths = synthetic_lengths(count, mean, 32768, seed=1)
    assert len(lengths) == count
    assert statistics.mean(lengths) == pytest.approx(mean, abs=0.5)
    assert 1 <= min(lengths) and max(lengths) <= 32768
    again = synthetic_lengths(count, mean, 32768, seed=2)
    assert sorted(again) == sorted(lengths)
    assert mean == 1 or again != lengths


def test_synthetic_lengths_follow_the_cut_off_log_normal_law() -> None:
    lengths = np.sort(synthetic_lengths(4000, 8192, 32768, seed=0))
    # Draws of the distribution itself, with the same median; longer ones get the cut-off's length.
    draws = np.random.default_rng(0).lognormal(math.log(np.median(lengths)), SIGMA, 400_000)
    draws = np.minimum(draws, 32768)
    assert draws.mean() == pytest.approx(8192, rel=0.01)
    quantiles = [0.01, 0.1, 0.5, 0.9, 0.97, 0.99]
    np.testing.assert_allclose(
        np.quantile(lengths, quantiles), np.quantile(draws, quantiles), rtol=0.02
    )
    assert np.mean(lengths == 32768) == pytest.approx(np.mean(draws == 32768), rel=0.05)


def test_eight_sequences_share_a_prompt() -> None:
    requests = make_requests(list(range(1, 21)), prompt_tokens=32, vocab_size=50, seed=3)
    assert [request.new_tokens for request in requests] == list(range(1, 21))
    prompts = [request.prompt for request in requests]
    assert all(len(prompt) == 32 and set(prompt) <= set(range(50)) for prompt in prompts)
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        assert all(prompt == prompts[start] for prompt in prompts[start:stop])
    assert prompts[0] != prompts[8] != prompts[16]
