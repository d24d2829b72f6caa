"""The trainer's sparse distribution and acceptance rates, against the contract's float64 loop."""

import numpy as np
import pytest
import torch
from contract import choose_pages
from distillation import new_policy
from engines import INT4_SCHEDULE, random_prompt
from oracle import ContractModel
from scipy.special import softmax

from sparrow_sglang.rl.policy import sparse_policy
from sparrow_sglang.rl.policy.selected_attention import BLOCK, block_mask
from sparrow_sglang.rl.policy.sparse_policy import SparseRule, padding
from sparrow_sglang.schedules.schedule import BudgetSchedule

CPU = torch.device("cpu")
GROWING = BudgetSchedule(name="grows", page_size=16, bin_tokens=64, budget_tokens=(48, 64, 80))
SEQUENCES = [
    (random_prompt(1, 20), random_prompt(2, 220)),
    (random_prompt(3, 150), random_prompt(4, 90)),
    (random_prompt(5, 3), random_prompt(6, 10)),
]


@pytest.mark.parametrize(("rows", "schedule"), [(7, GROWING), (512, GROWING), (50, INT4_SCHEDULE)])
def test_acceptance_rates_are_those_of_the_contract(sharp_llama, monkeypatch, rows, schedule):
    monkeypatch.setattr(sparse_policy, "_rows_at_once", lambda products_of_row: rows)
    monkeypatch.setattr(sparse_policy, "MASK_ROWS", 5 * rows // 7)
    sparse, dense = ContractModel(sharp_llama, schedule), ContractModel(sharp_llama)
    measured = new_policy(sharp_llama).acceptance(SEQUENCES, schedule)
    for (prompt, response), rates in zip(SEQUENCES, measured, strict=True):
        distributions = [
            softmax(model.log_probs(prompt, response), axis=1) for model in (sparse, dense)
        ]
        expected = np.minimum(*distributions).sum(1)
        np.testing.assert_allclose(rates, expected, atol=1e-4)
    # The first token comes out of the prefill, and short sequences are read as a whole.
    assert measured[0][0] > 1 - 1e-6 and measured[2].min() > 1 - 1e-6
    assert np.quantile(measured[0], 0.05) < 0.9


def test_gradients_flow_through_the_chosen_pages_only():
    """The reference is autograd through a plain softmax over the tokens that the forward kept.
    Three sequences are padded to one length; the last is within the budget."""
    torch.manual_seed(0)
    schedule = BudgetSchedule(name="t", page_size=16, bin_tokens=64, budget_tokens=(64,))
    spans, prompts = [(0, 150), (150, 277), (277, 317)], (100, 70, 39)
    rule = SparseRule(schedule, prompts)
    query, key, value = (
        torch.randn(1, heads, 317, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    out = sparse_policy.sparse_attention(query, key, value, spans, prompts, rule, 2, 0.3)
    direction = torch.randn_like(out)
    grads = torch.autograd.grad((out * direction).sum(), (query, key, value))
    kept = torch.zeros(4, 317, 317, dtype=torch.bool)
    for (first, end), prompt in zip(spans, prompts, strict=True):
        for t in range(end - first):
            for head in range(4):
                pages = range(t // 16 + 1)
                if t >= prompt:
                    group = slice(head // 2 * 2, head // 2 * 2 + 2)
                    mean = query[0, group, first + t].mean(0).detach()
                    keys = key[0, head // 2, first:end].detach()
                    scores = [float(mean @ keys[p * 16 : p * 16 + 16].mean(0)) for p in pages]
                    pages = choose_pages(scores, len(pages), 4, 1, 2)
                for p in pages:
                    read = slice(first + p * 16, first + min(p * 16 + 16, t + 1))
                    kept[head, first + t, read] = True
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


def case(heads, prompt, length):
    """A sequence and a shorter one: packed tensors, spans, prompt lengths."""
    query_heads, kv_heads, dim = heads
    torch.manual_seed(length)
    prompts = (prompt, prompt // 2 + 1)
    shorter = max(prompts[1] + 1, length - 37)
    tensors = tuple(
        torch.randn(1, count, length + shorter, dim) for count in (query_heads, kv_heads, kv_heads)
    )
    return tensors, [(0, length), (length, length + shorter)], prompts


@pytest.mark.parametrize(("page_size", "blocks_at_once"), [(16, 1), (16, 100), (64, 2)])
@pytest.mark.parametrize(("heads", "prompt", "length"), CASES)
def test_the_block_mask_is_the_selection_and_skips_nothing(
    heads, prompt, length, page_size, blocks_at_once, monkeypatch
):
    at_once = blocks_at_once * BLOCK
    monkeypatch.setattr(sparse_policy, "_rows_at_once", lambda products_of_row: at_once)
    bins = {"bin_tokens": 4 * page_size, "budget_tokens": (3 * page_size, 5 * page_size)}
    schedule = BudgetSchedule(name="t", page_size=page_size, **bins)
    (query, key, _), spans, prompts = case(heads, prompt, length)
    rule = SparseRule(schedule, prompts)
    pairs = list(zip(prompts, spans, strict=True))
    late = tuple((at, end - first) for at, (first, end) in pairs)
    rows = padding(tuple((first + at, end) for at, (first, end) in pairs), CPU).pad(query)
    keys = padding(tuple(spans), CPU).pad(key)

    def selection():
        return rule.selected_pages(rows, keys, late)

    group, count = heads[0] // heads[1], rows.shape[2]
    chosen = torch.zeros(2, heads[1], count, length, dtype=torch.bool)
    for part, kept in zip(chosen.split(at_once, 2), selection(), strict=True):
        tokens = kept.repeat_interleave(page_size, -1)[..., :length]
        part[..., : tokens.shape[-1]] = tokens
    mask = block_mask(selection(), padding(late, CPU).source, length, page_size, group)
    visited = mask.to_dense().repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    for sequence, (start, end) in enumerate(late):
        positions = torch.arange(start, end)
        # Each position reads as many tokens as the server says, itself the last of them.
        expected = chosen[sequence, :, : end - start] & (torch.arange(length) <= positions[:, None])
        read = torch.from_numpy(schedule.tokens_read(positions + 1))
        assert (expected.sum(-1) == read).all()
        expected = expected.repeat_interleave(group, 0)
        head, row, token = torch.meshgrid(
            torch.arange(heads[0]), torch.arange(end - start), torch.arange(length), indexing="ij"
        )
        assert torch.equal(mask.mask_mod(sequence, head, row, token), expected)
        assert (visited[sequence, :, : end - start, :length].bool() | ~expected).all()


@pytest.mark.parametrize(("heads", "prompt", "length"), CASES)
def test_attention_by_blocks_is_attention_by_rows(heads, prompt, length, monkeypatch):
    tensors, spans, prompts = case(heads, prompt, length)
    arguments = (*tensors, spans, prompts, SparseRule(GROWING, prompts), 2, None)
    expected = sparse_policy.sparse_attention(*arguments)
    monkeypatch.setattr(sparse_policy, "_by_rows", lambda query: False)
    torch.testing.assert_close(sparse_policy.sparse_attention(*arguments), expected)


def test_under_autocast_pages_are_selected_by_rounded_keys():
    """The server selects them so: its keys, queries and landmarks are bf16."""
    tensors, spans, prompts = case((4, 2, 16), 20, 400)
    rest = (spans, prompts, SparseRule(GROWING, prompts), 2, None)
    expected = sparse_policy.sparse_attention(*(x.bfloat16() for x in tensors), *rest)
    with torch.autocast("cpu", torch.bfloat16):
        attended = sparse_policy.sparse_attention(*tensors, *rest)
    assert torch.equal(attended, expected)
