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
from sparrow_sglang.rl.selected_attention import BLOCK, attend_by_blocks, block_mask
from sparrow_sglang.rl.sparse_policy import SparseRule
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
    monkeypatch.setattr(sparse_policy, "_rows_at_once", lambda scores_of_row: rows)
    monkeypatch.setattr(sparse_policy, "MASK_ROWS", 5 * rows // 7)
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
    rule = SparseRule(schedule, (100,))
    query = torch.randn(1, 4, 150, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 150, 8, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 2, 150, 8, dtype=torch.float64, requires_grad=True)
    out = sparse_policy.sparse_attention(query, key, value, rule, 0, 0.3)
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


# Heads, head dimension, prompt, length: around the edges of pages, blocks, words of bits and bins.
CASES = [
    ((4, 2, 16), 1, 66),
    ((4, 2, 16), 40, 128),
    ((9, 3, 64), 127, 513),
    ((9, 3, 64), 128, 656),
    ((4, 4, 128), 129, 640),
    ((16, 2, 32), 300, 301),
]


def query_key_value(heads, length, dtype=torch.float32, device="cpu"):
    query_heads, kv_heads, dim = heads
    torch.manual_seed(length)
    return tuple(
        torch.randn(1, count, length, dim).to(device, dtype)
        for count in (query_heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize(("page_size", "blocks_at_once"), [(16, 1), (16, 100), (64, 2)])
@pytest.mark.parametrize(("heads", "prompt", "length"), CASES)
def test_the_block_mask_is_the_selection_and_skips_nothing(
    heads, prompt, length, page_size, blocks_at_once, monkeypatch
):
    at_once = blocks_at_once * BLOCK
    monkeypatch.setattr(sparse_policy, "_rows_at_once", lambda scores_of_row: at_once)
    bins = {"bin_tokens": 4 * page_size, "budget_tokens": (3 * page_size, 5 * page_size)}
    schedule = BudgetSchedule(name="t", page_size=page_size, **bins)
    query, key, _ = query_key_value(heads, length)
    rule = SparseRule(schedule, (prompt,))

    def selection():
        return sparse_policy._selection(query[0, :, prompt:], key[0], prompt, rule)

    group, rows = heads[0] // heads[1], torch.arange(prompt, length)
    expected = torch.zeros(heads[1], length - prompt, length, dtype=torch.bool)
    for part, kept in zip(expected.split(at_once, 1), selection(), strict=True):
        tokens = kept.repeat_interleave(page_size, -1)[..., :length]
        part[..., : tokens.shape[-1]] = tokens
    # Each position reads as many tokens as the server says, itself the last of them.
    expected &= torch.arange(length) <= rows[:, None]
    read = torch.tensor([schedule.kv_tokens_read(int(t) + 1) for t in rows])
    assert (expected.sum(-1) == read).all()
    mask = block_mask(selection(), prompt, length, page_size, group)
    head, row, token = torch.meshgrid(
        torch.arange(heads[0]), torch.arange(length - prompt), torch.arange(length), indexing="ij"
    )
    assert torch.equal(mask.mask_mod(0, head, row, token), expected.repeat_interleave(group, 0))
    visited = mask.to_dense()[0].repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    kept = expected.repeat_interleave(group, 0)
    assert (visited[:, : length - prompt, :length].bool() | ~kept).all()


@pytest.mark.parametrize(("heads", "prompt", "length"), CASES)
def test_attention_by_blocks_is_attention_by_rows(heads, prompt, length):
    query, key, value = query_key_value(heads, length)
    rule = SparseRule(GROWING, (prompt,))
    expected = sparse_policy.sparse_attention(query, key, value, rule, 0, None)
    start = max(prompt, GROWING.first_sparse_length() - 1)
    selection = sparse_policy._selection(query[0, :, start:], key[0], start, rule)
    found = attend_by_blocks(query[:, :, start:], key, value, selection, start, 16, None)
    torch.testing.assert_close(found, expected[:, :, start:])


def test_under_autocast_pages_are_selected_by_rounded_keys():
    """As the server selects them: its keys, queries and landmarks are bf16."""
    query, key, value = query_key_value((4, 2, 16), 400)
    rule = SparseRule(GROWING, (20,))
    rounded = [x.bfloat16() for x in (query, key, value)]
    expected = sparse_policy.sparse_attention(*rounded, rule, 0, None)
    with torch.autocast("cpu", torch.bfloat16):
        found = sparse_policy.sparse_attention(query, key, value, rule, 0, None)
    assert torch.equal(found, expected)
