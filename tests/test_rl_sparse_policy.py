"""The trainer's sparse law and acceptance rates, against the contract's loop in float64."""

import numpy as np
import pytest
import torch
from engines import random_prompt
from oracle import ContractModel
from scipy.special import softmax

from sparrow_sglang.rl import sparse_policy
from sparrow_sglang.rl.config import ModelConfig, OptimiserConfig
from sparrow_sglang.rl.dense_policy import DensePolicy
from sparrow_sglang.schedule import BudgetSchedule

GROWING = BudgetSchedule(name="grows", page_size=16, bin_tokens=64, budget_tokens=(48, 64, 80))
SEQUENCES = [
    (random_prompt(1, 20), random_prompt(2, 220)),
    (random_prompt(3, 150), random_prompt(4, 90)),
    (random_prompt(5, 3), random_prompt(6, 10)),
]


@pytest.fixture(scope="module")
def policy(sharp_llama) -> DensePolicy:
    return DensePolicy.load(ModelConfig(path=sharp_llama), OptimiserConfig(), "cpu")


@pytest.mark.parametrize("rows", [7, 512])
def test_acceptance_rates_are_those_of_the_contract(policy, sharp_llama, monkeypatch, rows):
    monkeypatch.setattr(sparse_policy, "QUERY_ROWS", rows)
    sparse, dense = ContractModel(sharp_llama, GROWING), ContractModel(sharp_llama)
    found = policy.acceptance(SEQUENCES, GROWING)
    for (prompt, response), rates in zip(SEQUENCES, found, strict=True):
        laws = [softmax(model.log_probs(prompt, response), axis=1) for model in (sparse, dense)]
        expected = np.minimum(*laws).sum(1)
        np.testing.assert_allclose(rates, expected, atol=1e-4)
    # The first token comes out of the prefill, and short sequences are read as a whole.
    assert found[0][0] > 1 - 1e-6 and found[2].min() > 1 - 1e-6
    assert np.quantile(found[0], 0.05) < 0.9


def test_a_budget_for_everything_is_the_dense_law(policy):
    found = policy.acceptance(SEQUENCES, BudgetSchedule.fixed(256))
    assert min(rates.min() for rates in found) > 1 - 1e-6


def test_gradients_flow_through_the_chosen_pages_only():
    """Against autograd through a plain softmax over the tokens that the forward pass kept."""
    torch.manual_seed(0)
    schedule = BudgetSchedule(name="t", page_size=16, bin_tokens=64, budget_tokens=(64,))
    query = torch.randn(1, 4, 150, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 150, 8, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 2, 150, 8, dtype=torch.float64, requires_grad=True)
    out = sparse_policy.sparse_attention(query, key, value, 100, schedule, 0.3)
    direction = torch.randn_like(out)
    grads = torch.autograd.grad((out * direction).sum(), (query, key, value))
    kept = torch.zeros(4, 150, 150, dtype=torch.bool)
    for t in range(150):
        for head in range(4):
            pages = range(t // 16 + 1)
            if t >= 100 and len(pages) > 4:
                mean = query[0, head // 2 * 2 : head // 2 * 2 + 2, t].mean(0).detach()
                marks = [key[0, head // 2, p * 16 : p * 16 + 16].mean(0).detach() for p in pages]
                middle = sorted(pages[1:-2], key=lambda p: -float(mean @ marks[p]))
                pages = [0, *middle[:1], pages[-2], pages[-1]]
            for p in pages:
                kept[head, t, p * 16 : min(p * 16 + 16, t + 1)] = True
    logits = 0.3 * query[0] @ key[0].repeat_interleave(2, 0).transpose(1, 2)
    weights = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    expected = weights @ value[0].repeat_interleave(2, 0)
    torch.testing.assert_close(out[0], expected)
    checks = torch.autograd.grad((expected * direction[0]).sum(), (query, key, value))
    for grad, check in zip(grads, checks, strict=True):
        torch.testing.assert_close(grad, check)
