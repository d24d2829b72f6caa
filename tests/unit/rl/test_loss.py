"""The policy loss against a loop over tokens."""

import math
from typing import Any

import pytest
import torch

from sparrow_sglang.rl.config import AlgorithmConfig
from sparrow_sglang.rl.loss import MiniBatchLoss, policy_loss


def tensors(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def loss_of(*values: torch.Tensor, batch_tokens: int) -> Any:
    return policy_loss(*values, batch_tokens, AlgorithmConfig())


# Clip range 0.8 to 1.28, dual clip 3. (ratio, advantage) -> loss
CASES = [
    (1.0, 2.0, -2.0),
    (1.2, 2.0, -2.4),
    (1.5, 2.0, -2.56),  # clipped from above: -2 * 1.28
    (0.5, 2.0, -1.0),  # below the range, but the larger loss is the plain one
    (1.0, -2.0, 2.0),
    (0.5, -2.0, 1.6),  # clipped from below: 2 * 0.8
    (2.5, -2.0, 5.0),  # above the range, but the larger loss is the plain one
    (4.0, -2.0, 6.0),  # dual clip: 2 * 3
    (5.0, 0.0, 0.0),
]


def test_shares_of_clipped_tokens_and_kl() -> None:
    ratios = [case[0] for case in CASES]
    advantages = [case[1] for case in CASES]
    new, old, adv, w = tensors([math.log(r) for r in ratios], [0.0] * 9, advantages, [1.0] * 9)
    _, metrics = loss_of(new, old, adv, w, batch_tokens=18)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 18)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 18)
    assert metrics["actor/ppo_kl"] == pytest.approx(-sum(map(math.log, ratios)) / 18)
    assert metrics["actor/pg_loss"] == pytest.approx(sum(case[2] for case in CASES) / 18)


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    for advantage in (1.0, -1.0):
        new = torch.tensor([0.0], requires_grad=True)
        old, adv, w = torch.tensor([-1000.0]), torch.tensor([advantage]), torch.ones(1)
        loss, _ = loss_of(new, old, adv, w, batch_tokens=1)
        assert loss.item() == pytest.approx(-1.28 if advantage > 0 else 3.0)


@pytest.mark.parametrize("name", ["none", "tis"])
def test_on_policy_it_is_the_loss_of_log_probs_that_were_scored_before(name: str) -> None:
    """This holds whatever the micro-batches, which take sequences in an order of their own."""
    torch.manual_seed(3)
    settings = AlgorithmConfig(correction=name)
    new = -2 * torch.rand(16)
    tensors = new + 0.5 * torch.randn(16), torch.randn(16), settings
    scored, on_policy = MiniBatchLoss(*tensors, new), MiniBatchLoss(*tensors)
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


def test_loss_and_gradient_are_those_of_a_loop_over_tokens() -> None:
    torch.manual_seed(4)
    old, adv, recorded = -2 * torch.rand(64), torch.randn(64), -2 * torch.rand(64)
    weights = (old - recorded).exp().clamp(max=2.0)
    # Far enough for every clip.
    new = old + torch.randn(64)
    loss = MiniBatchLoss(recorded, adv, AlgorithmConfig(), old)
    logprobs = new.clone().requires_grad_()
    parts = [torch.arange(1), torch.cat([torch.arange(10, 64), torch.arange(1, 10)])]
    total = sum(loss(logprobs[where], where) for where in parts)
    total.backward()

    def of_token(p: Any, o: Any, a: Any, w: Any) -> Any:
        ratio = (p - o).exp()
        upper = max(-a * ratio, -a * ratio.clamp(0.8, 1.28))
        return w * (min(upper, -3 * a) if a < 0 else upper)

    exact = new.double().requires_grad_()
    columns = exact, old.double(), adv.double(), weights.double()
    expected = torch.stack([of_token(*values) for values in zip(*columns, strict=True)]).mean()
    expected.backward()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(logprobs.grad, exact.grad.float(), atol=1e-6, rtol=1e-4)
