"""The policy loss against a loop over tokens and the plain policy gradient."""

import math
from typing import Any

import pytest
import torch

from sparrow_sglang.rl.config import AlgorithmConfig
from sparrow_sglang.rl.correction import CORRECTIONS, correct
from sparrow_sglang.rl.loss import MiniBatchLoss, policy_loss


def tensors(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def loss_of(*values: torch.Tensor, batch_tokens: int) -> Any:
    return policy_loss(*values, batch_tokens, AlgorithmConfig())


# Clip range 0.8 to 1.28, dual clip 3. (ratio, advantage) -> loss, is the gradient cut off?
CASES = [
    (1.0, 2.0, -2.0, False),
    (1.2, 2.0, -2.4, False),
    (1.5, 2.0, -2.56, True),  # clipped from above: -2 * 1.28
    (0.5, 2.0, -1.0, False),  # below the range, but the larger loss is the plain one
    (1.0, -2.0, 2.0, False),
    (0.5, -2.0, 1.6, True),  # clipped from below: 2 * 0.8
    (2.5, -2.0, 5.0, False),  # above the range, but the larger loss is the plain one
    (4.0, -2.0, 6.0, True),  # dual clip: 2 * 3
    (5.0, 0.0, 0.0, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "expected", "cut"), CASES)
def test_one_token_by_hand(ratio: float, advantage: float, expected: float, cut: bool) -> None:
    new, old, adv, w = tensors([math.log(ratio) - 1], [-1.0], [advantage], [1.0])
    loss, _ = loss_of(new.requires_grad_(), old, adv, w, batch_tokens=1)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    loss.backward()
    # Where the gradient is not cut off the loss is -A r, which is its own derivative in log r.
    slope = 0.0 if cut else expected
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_shares_of_clipped_tokens_and_kl() -> None:
    ratios = [case[0] for case in CASES]
    advantages = [case[1] for case in CASES]
    new, old, adv, w = tensors([math.log(r) for r in ratios], [0.0] * 9, advantages, [1.0] * 9)
    _, metrics = loss_of(new, old, adv, w, batch_tokens=18)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 18)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 18)
    assert metrics["actor/ppo_kl"] == pytest.approx(-sum(map(math.log, ratios)) / 18)
    assert metrics["actor/pg_loss"] == pytest.approx(sum(case[2] for case in CASES) / 18)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_with_equal_actor_and_policy_it_is_the_plain_policy_gradient(name: str) -> None:
    """That of a softmax policy in closed form is -A (one-hot - p) per token, averaged."""
    torch.manual_seed(2)
    logits = torch.randn(12, 9, dtype=torch.float64, requires_grad=True)
    sampled = torch.randint(0, 9, (12,))
    adv = torch.randn(12, dtype=torch.float64)
    logprobs = torch.log_softmax(logits, 1)[torch.arange(12), sampled]
    correction = correct(logprobs, logprobs.detach(), [5, 7], AlgorithmConfig(correction=name))
    assert not correction.weights.requires_grad
    loss, _ = loss_of(logprobs, logprobs, adv, correction.weights, batch_tokens=12)
    loss.backward()
    one_hot = torch.nn.functional.one_hot(sampled, 9).double()
    expected = -adv[:, None] * (one_hot - torch.softmax(logits.detach(), 1)) / 12
    torch.testing.assert_close(logits.grad, expected, atol=1e-12, rtol=1e-9)


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    for advantage in (1.0, -1.0):
        new = torch.tensor([0.0], requires_grad=True)
        old, adv, w = torch.tensor([-1000.0]), torch.tensor([advantage]), torch.ones(1)
        loss, _ = loss_of(new, old, adv, w, batch_tokens=1)
        assert loss.item() == pytest.approx(-1.28 if advantage > 0 else 3.0)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_it_is_the_loss_of_log_probs_that_were_scored_before(name: str) -> None:
    """This holds whatever the micro-batches, which take sequences in an order of their own."""
    torch.manual_seed(3)
    settings = AlgorithmConfig(correction=name, mask_high=1.5, kl_coefficient=0.1)
    new = -2 * torch.rand(16)
    tensors = new + 0.5 * torch.randn(16), torch.randn(16), [5, 7, 4], settings
    scored = MiniBatchLoss(*tensors, new, new - 1)
    on_policy = MiniBatchLoss(*tensors, None, new - 1)
    parts = [torch.arange(5, 12), torch.cat([torch.arange(12, 16), torch.arange(5)])]
    gradients = []
    for loss in (scored, on_policy):
        total = new.clone().requires_grad_()
        sum(loss(total[where], where) for where in parts).backward()
        gradients.append(total.grad)
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5)
    assert gradients[0].abs().max() > 0.01
    assert torch.equal(on_policy.seen, new)
    assert on_policy.metrics == pytest.approx(scored.metrics)


# Sums over tokens of loss l_it of response i, written as in the papers that name them.
AGGREGATIONS = {
    "token_mean": lambda parts: sum(map(sum, parts)) / sum(map(len, parts)),
    "sequence_mean": lambda parts: sum(sum(p) / len(p) for p in parts) / len(parts),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
def test_an_aggregation_with_a_kl_term_is_that_of_a_loop_over_responses(
    name: str, kl_coefficient: float
) -> None:
    torch.manual_seed(4)
    lengths = [1, 9, 4, 2]
    settings = AlgorithmConfig(aggregation=name, kl_coefficient=kl_coefficient)
    old, adv, recorded = -2 * torch.rand(16), torch.randn(16), -2 * torch.rand(16)
    weights = (old - recorded).exp().clamp(max=2.0)
    reference, new = old + torch.randn(16), old + 0.2 * torch.randn(16)
    loss = MiniBatchLoss(
        recorded, adv, lengths, settings, old, reference if kl_coefficient else None
    )
    logprobs = new.clone().requires_grad_()
    parts = [torch.arange(1), torch.cat([torch.arange(10, 16), torch.arange(1, 10)])]
    total = sum(loss(logprobs[where], where) for where in parts)
    total.backward()

    def of_token(p: float, o: float, a: float, w: float, q: float) -> tuple[float, float]:
        ratio = math.exp(p - o)
        upper = max(-a * ratio, -a * min(max(ratio, 0.8), 1.28))
        return w * upper, math.exp(q - p) - (q - p) - 1

    def expected(p: torch.Tensor) -> tuple[float, float]:
        columns = [values.tolist() for values in (p, old, adv, weights, reference)]
        terms = [of_token(*values) for values in zip(*columns, strict=True)]
        starts = [sum(lengths[:i]) for i in range(5)]
        spans = [terms[a:b] for a, b in zip(starts, starts[1:], strict=False)]
        both = [AGGREGATIONS[name]([[t[i] for t in span] for span in spans]) for i in (0, 1)]
        return both[0], both[1]

    policy, kl = expected(new.double())
    assert float(total.detach()) == pytest.approx(policy + kl_coefficient * kl, rel=1e-5)
    if kl_coefficient:
        assert loss.metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-5)
    step = 1e-6
    moved = new.double()
    moved[3] += step
    after_policy, after_kl = expected(moved)
    slope = (after_policy - policy + kl_coefficient * (after_kl - kl)) / step
    assert logprobs.grad is not None
    assert float(logprobs.grad[3]) == pytest.approx(slope, rel=1e-3)
