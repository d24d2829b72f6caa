"""DistillSparse: divergences against float64 loops, and what an adapter step moves."""

from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from distillation import SCHEDULE, SEQUENCES, new_policy, settings
from scipy.special import log_softmax

from sparrow_sglang.rl.distill import SparseAdapter, top_k_kl
from sparrow_sglang.rl.policy import chunked_logprobs, optimizer
from sparrow_sglang.rl.policy.sparse_policy import SparseRule


def logits_of_both(policy, adapted=nullcontext, gradients=False):
    """Logits [N, V] of the sampled tokens of SEQUENCES: the sparse actor's and the policy's."""
    sparse, dense = [], []
    with torch.set_grad_enabled(gradients):
        for packed in policy.micro_batches(SEQUENCES):
            dense.append(policy.hidden(packed) @ policy.head.T)
            with adapted():
                hidden = policy.hidden(packed, SparseRule(SCHEDULE, packed.prompt_lengths))
            sparse.append(hidden @ policy.head.T)
    return torch.cat(sparse), torch.cat(dense)


def test_divergences_equal_loops_over_the_tokens():
    draw = np.random.default_rng(0)
    sparse, dense = 3 * draw.standard_normal((2, 5, 40))
    p, q = log_softmax(sparse, axis=1), log_softmax(dense, axis=1)
    exact, listed = [], []
    for a, b in zip(p, q, strict=True):
        exact.append(sum(np.exp(a[i]) * (a[i] - b[i]) for i in range(40)))
        union = set(np.argsort(-a)[:6]) | set(np.argsort(-b)[:6])
        rest = [sum(np.exp(side[i]) for i in range(40) if i not in union) for side in (a, b)]
        known = sum(np.exp(a[i]) * (a[i] - b[i]) for i in union)
        listed.append(known + rest[0] * np.log(rest[0] / rest[1]))
    left, right = torch.tensor(p), torch.tensor(q)
    np.testing.assert_allclose(top_k_kl(left, right, 6), listed, rtol=1e-10)
    np.testing.assert_allclose(top_k_kl(left, right, 40), exact, atol=1e-4)
    assert (top_k_kl(left, right, 6).numpy() <= exact).all()
    assert torch.autograd.gradcheck(lambda x: top_k_kl(x, right, 6), left.requires_grad_())


def test_steps_raise_the_tail_and_leave_the_policy_as_it_is(sharp_llama, monkeypatch):
    policy = new_policy(sharp_llama)
    untouched = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(lr=1e-2))
    before = policy.acceptance(SEQUENCES, SCHEDULE, adapter.enabled)
    for rates, plain in zip(before, policy.acceptance(SEQUENCES, SCHEDULE), strict=True):
        np.testing.assert_array_equal(rates, plain)
    divergences = [adapter.step(SEQUENCES, SCHEDULE)["sparrow/distill_kl"]]
    # From here on a chunk holds as few rows of logits as it does for a long sequence.
    monkeypatch.setattr(chunked_logprobs, "CHUNK_ELEMENTS", 256 * 50)
    divergences += [adapter.step(SEQUENCES, SCHEDULE)["sparrow/distill_kl"] for _ in range(12)]
    assert divergences[-1] < 0.5 * divergences[0]
    after = policy.acceptance(SEQUENCES, SCHEDULE, adapter.enabled)
    tails = [np.quantile(np.concatenate(rates), 0.05) for rates in (before, after)]
    assert tails[1] > tails[0] + 0.05
    # The dense log-probs and the policy's weights are what they were, bit for bit.
    expected, current = dict(untouched.named_weights()), dict(policy.named_weights())
    assert expected.keys() == current.keys()
    assert all(torch.equal(expected[name], current[name]) for name in expected)
    for left, right in zip(policy.score(SEQUENCES)[0], untouched.score(SEQUENCES)[0], strict=True):
        assert torch.equal(left, right)
    # And the policy can still be trained, without the adapter.
    before = [value.clone() for value in adapter.tensors().values()]
    for trained in (policy, untouched):
        trained.loss_step(SEQUENCES, lambda logprobs, where: -logprobs.mean())
    expected, current = dict(untouched.named_weights()), dict(policy.named_weights())
    assert all(torch.equal(expected[name], current[name]) for name in expected)
    assert all(map(torch.equal, before, adapter.tensors().values()))


@pytest.mark.parametrize("tokens", [16384, 200])
def test_the_gradient_is_that_of_the_squared_gap_of_the_whole_step(
    sharp_llama, monkeypatch, tokens
):
    """However the step is split into micro-batches: the mean of each has another sign or size."""
    policy = new_policy(sharp_llama, micro_batch_tokens=tokens)
    torch.manual_seed(0)
    adapter = SparseAdapter(policy, settings(entropy=50.0))
    adapter.step(SEQUENCES, SCHEDULE)
    factors = adapter.state_dict()["params"]
    gradients = []
    monkeypatch.setattr(
        optimizer.ClippedAdamW,
        "clipped_step",
        lambda self: gradients.extend(one.grad.clone() for one in adapter._params) or 0.0,
    )
    adapter._optimizer.zero_grad()
    metrics = adapter.step(SEQUENCES, SCHEDULE)
    with policy.frozen():
        sparse, dense = (
            each.log_softmax(-1) for each in logits_of_both(policy, adapter.enabled, gradients=True)
        )
        gap = (-(sparse.exp() * sparse) + dense.exp() * dense).sum(1).mean()
        loss = top_k_kl(sparse, dense.detach(), 20).mean() + 50.0 * gap.square()
        # Without the adapter its factors take no gradient.
        with adapter.enabled():
            expected = torch.autograd.grad(loss, adapter._params)
    assert len(gradients) == len(factors) and abs(float(gap.detach())) > 1e-4
    assert metrics["sparrow/distill_entropy_gap"] == pytest.approx(float(gap.detach()), abs=1e-5)
    largest = max(float(one.abs().max()) for one in expected)
    for found, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-4 * largest, rtol=1e-4)


def test_a_resumed_adapter_takes_the_steps_that_it_would_have_taken(sharp_llama):
    adapter = SparseAdapter(new_policy(sharp_llama), settings())
    for _ in range(3):
        adapter.step(SEQUENCES, SCHEDULE)
    saved = deepcopy(adapter.state_dict())
    resumed = SparseAdapter(new_policy(sharp_llama), settings())
    resumed.load_state_dict(saved)
    for _ in range(2):
        assert resumed.step(SEQUENCES, SCHEDULE) == adapter.step(SEQUENCES, SCHEDULE)
    factors = (each.state_dict()["params"] for each in (resumed, adapter))
    assert all(map(torch.equal, *factors))


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_a_step_lowers_the_divergence_at_its_temperature(sharp_llama, temperature):
    """The divergence is that of whole distributions, of a sparse and a dense forward pass."""
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(top_k=256))
    p, q = (
        log_softmax(logits.double().numpy() / temperature, axis=1)
        for logits in logits_of_both(policy)
    )
    metrics = adapter.step(SEQUENCES, SCHEDULE, temperature=temperature)
    expected = (np.exp(p) * (p - q)).sum(1).mean()
    assert metrics["sparrow/distill_kl"] == pytest.approx(expected, rel=1e-3)
    rates = np.concatenate(
        new_policy(sharp_llama).acceptance(SEQUENCES, SCHEDULE, temperature=temperature)
    )
    alpha = np.minimum(np.exp(p), np.exp(q)).sum(1)
    np.testing.assert_allclose(np.sort(rates), np.sort(alpha), atol=1e-4)
