"""Corrections and mismatch metrics against loops over plain floats."""

import math
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from sparrow_sglang.rl.config import AlgorithmConfig
from sparrow_sglang.rl.loss import correction_metrics, importance_weights
from sparrow_sglang.rl.metrics import (
    acceptance_metrics,
    entropy_metrics,
    mismatch_metrics,
    rollout_metrics,
)
from sparrow_sglang.rl.types import Group, Prompt, Rollout

# Two responses, whose ratios dense / rollout are 1/2, 4 and 3, 1/10, 1, 6.
RATIOS = [0.5, 4.0, 3.0, 0.1, 1.0, 6.0]
LENGTHS = [2, 4]
ROLLOUT = [math.log(p) for p in (0.2, 0.1, 0.3, 0.9, 0.5, 0.05)]
DENSE = [r + math.log(x) for r, x in zip(ROLLOUT, RATIOS, strict=True)]


def logprobs(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"correction": "none"}, [1, 1, 1, 1, 1, 1]),
        ({"correction": "tis"}, [0.5, 2, 2, 0.1, 1, 2]),
        ({"correction": "tis", "tis_cap": 3.5}, [0.5, 3.5, 3, 0.1, 1, 3.5]),
        ({"correction": "tis", "tis_cap": math.inf}, RATIOS),
    ],
)
def test_weights_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    weights = importance_weights(*logprobs(DENSE, ROLLOUT), AlgorithmConfig(**settings))
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_weights_have_no_gradient_and_stay_finite_where_ratios_do_not() -> None:
    dense = torch.tensor([0.0, -1000.0], requires_grad=True)
    settings = AlgorithmConfig(tis_cap=math.inf)
    weights = importance_weights(dense, torch.tensor([-1000.0, 0.0]), settings)
    assert not weights.requires_grad
    # verl's bound of a log ratio is 20.
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_importance_metrics_by_hand() -> None:
    """Of the weights, as in verl 0.9.1; the shares are of the ratios."""
    tensors = logprobs(DENSE, ROLLOUT)
    metrics = correction_metrics(*tensors, LENGTHS, AlgorithmConfig())
    weights = [0.5, 2.0, 2.0, 0.1, 1.0, 2.0]
    mean, squares = fmean(weights), fmean(x * x for x in weights)
    expected = {
        "mean": mean,
        "max": 2.0,
        "min": 0.1,
        "std": math.sqrt(squares - mean**2),
        "eff_sample_size": mean**2 / squares,
        "ratio_fraction_high": 3 / 6,
        "ratio_fraction_low": 1 / 6,
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(value), name
    others = correction_metrics(*tensors, LENGTHS, AlgorithmConfig(correction="none"))
    assert not any("rollout_is" in name for name in others)
    assert others == mismatch_metrics(*tensors, LENGTHS) and others.items() <= metrics.items()


def test_mismatch_metrics_equal_a_loop() -> None:
    draw = np.random.default_rng(0)
    lengths = [3, 1, 40, 17]
    rollout = -draw.exponential(size=61)
    dense = np.minimum(rollout + 0.3 * draw.normal(size=61), -1e-3)
    got = mismatch_metrics(torch.tensor(dense), torch.tensor(rollout), lengths)

    ratios = [math.exp(d - r) for d, r in zip(dense, rollout, strict=True)]
    ends = np.cumsum([0, *lengths])
    difference, product, dense_ppl, rollout_ppl = [], [], [], []
    for start, end in pairwise(ends):
        d, r = math.fsum(dense[start:end]), math.fsum(rollout[start:end])
        difference.append((r - d) / (end - start))
        product.append(math.exp(d - r))
        dense_ppl.append(-d / (end - start))
        rollout_ppl.append(-r / (end - start))
    expected = {
        "rollout_corr/kl": -fmean(map(math.log, ratios)),
        "rollout_corr/k3_kl": fmean(x - math.log(x) - 1 for x in ratios),
        "rollout_corr/training_ppl": fmean(map(math.exp, dense_ppl)),
        "rollout_corr/training_log_ppl": fmean(dense_ppl),
        "rollout_corr/rollout_ppl": fmean(map(math.exp, rollout_ppl)),
        "rollout_corr/rollout_log_ppl": fmean(rollout_ppl),
        "rollout_corr/log_ppl_diff": fmean(difference),
        "rollout_corr/log_ppl_abs_diff": fmean(map(abs, difference)),
        "rollout_corr/log_ppl_diff_max": max(difference),
        "rollout_corr/log_ppl_diff_min": min(difference),
        "rollout_corr/ppl_ratio": fmean(map(math.exp, difference)),
        "rollout_corr/chi2_token": fmean(x * x for x in ratios) - 1,
        "rollout_corr/chi2_seq": fmean(x * x for x in product) - 1,
        "training/rollout_probs_diff_mean": float(np.abs(np.exp(dense) - np.exp(rollout)).mean()),
        "training/rollout_probs_diff_max": float(np.abs(np.exp(dense) - np.exp(rollout)).max()),
        "sparrow/accept_mean_estimate": fmean(min(1.0, x) for x in ratios),
        "sparrow/ratio_p05": sorted(min(1.0, x) for x in ratios)[math.ceil(61 / 20) - 1],
        "sparrow/ess_token": math.fsum(ratios) ** 2 / (61 * math.fsum(x * x for x in ratios)),
        "sparrow/ess_response": math.fsum(product) ** 2 / (4 * math.fsum(x * x for x in product)),
    }
    assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_the_entropy_gap_is_that_of_the_actor_less_the_policys(temperature: float) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(8, 50)) * 2
    policy, actor = softmax(logits, 1), softmax(logits / temperature, 1)
    tokens = [draw.choice(50, size=4000, p=p) for p in actor]
    sampled = np.concatenate([np.log(p[some]) for p, some in zip(actor, tokens, strict=True)])
    entropies = np.repeat([entropy(p) for p in policy], 4000)
    found = entropy_metrics(torch.tensor(sampled), torch.tensor(entropies))
    assert found["actor/entropy"] == pytest.approx(entropies.mean())
    expected = np.mean([entropy(p) for p in actor]) - entropies.mean()
    assert found["sparrow/entropy_gap"] == pytest.approx(expected, abs=0.02)


def test_tail_of_exact_acceptance_rates_by_bin() -> None:
    alpha = np.concatenate([np.arange(1, 101) / 100, np.arange(1, 41) / 50])
    # Rates of tokens in no bin, which no sparse step decoded, do not count.
    alpha = np.concatenate([alpha, np.zeros(30)])
    bins = np.repeat([0, 1, -1], [100, 40, 30])
    order = np.random.default_rng(0).permutation(170)
    got = acceptance_metrics(alpha[order], bins[order])
    assert acceptance_metrics(alpha[-30:], bins[-30:]) == {}
    assert got == pytest.approx(
        {
            # The 5th and the 2nd smallest; of all 140 the 7th: .01 .02 .02 .03 .04 .04 .05.
            "sparrow/accept_p05_bin0": 0.05,
            "sparrow/accept_p05_bin1": 0.04,
            "sparrow/accept_p05": 0.05,
            "sparrow/accept_mean": float(alpha[:140].mean()),
        }
    )


def test_rollout_metrics() -> None:
    def rollout(sample: int, tokens: int, reason: str) -> Rollout:
        tokens_and_logprobs = tuple(range(tokens)), np.zeros(tokens)
        return Rollout(
            "p", sample, (1,), *tokens_and_logprobs, reason, "0", "s", "", retracted=sample > 0
        )

    group = Group(Prompt("p", "t", (1,)), (rollout(0, 3, "stop"), rollout(1, 8, "length")))
    other = Group(Prompt("q", "u", (1, 2, 3)), group.rollouts)
    metrics = rollout_metrics([group, other], [[0.0, 1.0], [1.0, 1.0]])
    assert (metrics["prompt_length/mean"], metrics["prompt_length/max"]) == (2.0, 3.0)
    assert (metrics["sparrow/task/t/score"], metrics["sparrow/task/u/score"]) == (0.5, 1.0)
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["response_length/mean"] == 5.5
    assert metrics["response_length/max"] == 8.0
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["sparrow/retracted_fraction"] == 0.5
