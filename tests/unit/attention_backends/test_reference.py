"""The torch step against the float64 loop of `contract.py`, at every kind of boundary."""

from typing import Any

import numpy as np
import pytest
import torch
from contract import budget_pages, choose_pages, decode_one, layer_budget
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import Pool, chosen_pairs, make_schedule

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.landmarks import (
    Int4Landmarks,
    Landmarks,
    allocate_landmarks,
    kept_pairs,
)
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.selection import SelectionRule, int4_landmark_tokens

HEADS = [(9, 3), (2, 2), (16, 1), (6, 2), (4, 4)]


def budgets_of(schedule: BudgetSchedule, pool: Pool) -> BudgetTable:
    return BudgetTable(schedule, 4, len(pool.req_to_token), "cpu")


def landmarks_of(pool: Pool, schedule: BudgetSchedule, layer: int = 0) -> Landmarks:
    """Landmark buffers of the pool's pages before any is computed: scoring one would give NaN."""
    pages = pool.k.shape[0] // schedule.page_size
    _, heads, head_dim = pool.k.shape
    pairs = kept_pairs(schedule.selection, layer, range(heads), head_dim)
    landmarks = allocate_landmarks(
        pages, schedule.page_size, heads, head_dim, pairs, pool.k.dtype, "cpu"
    )
    (landmarks.scales if isinstance(landmarks, Int4Landmarks) else landmarks.means).fill_(torch.nan)
    return landmarks


def run_step(
    pool: Pool, schedule: BudgetSchedule, sm_scale: float, layer_id: int = 0, v_scale: float = 1.0
) -> torch.Tensor:
    """Prefill all but the last token of each request, then decode it, as a server does."""
    step = TorchPagedDecode(budgets_of(schedule, pool), pool.req_to_token)
    landmarks = landmarks_of(pool, schedule, layer_id)
    before = (pool.lengths - 1).clamp_min(1)
    step.plan_extend(pool.rows, before, before)
    step.update_landmarks(pool.k, landmarks)
    step.plan_decode(pool.rows, pool.lengths, pool.lengths)
    return step.decode(pool.q, pool.k, pool.v, landmarks, layer_id, sm_scale, v_scale)


def edge_lengths(page_size: int, bin_pages: int, bins: int) -> list[int]:
    """One token either side of every page edge near every bin edge, and the shortest lengths."""
    lengths = {1, 2, page_size - 1, page_size, page_size + 1}
    for edge in range(1, bins + 1):
        pages = edge * bin_pages
        for near in (pages - 1, pages, pages + 1):
            lengths |= {near * page_size + offset for offset in (-1, 0, 1)}
    return sorted(length for length in lengths if length > 0)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_step_equals_the_contract_on_both_sides_of_every_edge(page_size: int, heads: tuple):
    bin_pages, budgets = 3, [3, 4, 4, 6]
    schedule = make_schedule(page_size, bin_pages, budgets)
    lengths = edge_lengths(page_size, bin_pages, len(budgets))
    pool = Pool(lengths, heads, head_dim=16, page_size=page_size, seed=page_size + heads[0])
    out = run_step(pool, schedule, sm_scale=0.25)
    for row, length in enumerate(lengths):
        budget = budget_pages(length, page_size, schedule.bin_tokens, schedule.budget_tokens)
        expected, _ = decode_one(
            pool.q[row].double().numpy(),
            pool.keys_of(row),
            pool.values_of(row),
            budget,
            page_size,
            0.25,
            store=lambda mean: mean.astype(np.float32).astype(np.float64),
        )
        np.testing.assert_allclose(out[row].numpy(), expected, atol=2e-6, err_msg=f"{length=}")


@pytest.mark.parametrize("heads", HEADS)
def test_a_sink_joins_the_softmax_in_sparse_and_dense_layers(heads: tuple):
    schedule = make_schedule(16, 3, [3, 4, 4, 6])
    pool = Pool([1, 16, 40, 150, 333], heads, head_dim=16, page_size=16, seed=heads[0])
    sinks = torch.linspace(-20, 8, heads[0])
    step = TorchPagedDecode(budgets_of(schedule, pool), pool.req_to_token)
    landmarks = landmarks_of(pool, schedule)
    step.plan_extend(pool.rows, pool.lengths, pool.lengths)
    step.update_landmarks(pool.k, landmarks)
    step.plan_decode(pool.rows, pool.lengths, pool.lengths)
    sparse = step.decode(pool.q, pool.k, pool.v, landmarks, 0, 0.25, sinks=sinks)
    dense = step.decode(pool.q, pool.k, pool.v, None, 1, 0.25, sinks=sinks)
    for row, length in enumerate(pool.lengths.tolist()):
        budget = budget_pages(length, 16, schedule.bin_tokens, schedule.budget_tokens)
        for out, pages in ((sparse, budget), (dense, length)):
            expected, _ = decode_one(
                pool.q[row].double().numpy(),
                pool.keys_of(row),
                pool.values_of(row),
                pages,
                16,
                0.25,
                logit_sinks=sinks.double().numpy(),
            )
            np.testing.assert_allclose(out[row].numpy(), expected, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    budgets=st.lists(st.integers(3, 12), min_size=1, max_size=5).map(sorted),
    bin_pages=st.integers(1, 6),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 2**20),
)
def test_step_equals_the_contract_on_random_batches(lengths, budgets, bin_pages, heads, seed):
    schedule = make_schedule(16, bin_pages, budgets)
    pool = Pool(lengths, heads, head_dim=8, page_size=16, seed=seed)
    out = run_step(pool, schedule, sm_scale=0.5)
    for row, length in enumerate(lengths):
        budget = budget_pages(length, 16, schedule.bin_tokens, schedule.budget_tokens)
        expected, _ = decode_one(
            pool.q[row].double().numpy(), pool.keys_of(row), pool.values_of(row), budget, 16, 0.5
        )
        np.testing.assert_allclose(out[row].numpy(), expected, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    num_pages=st.integers(1, 40),
    sinks=st.integers(0, 3),
    recents=st.integers(1, 4),
)
def test_selection_equals_the_contract_with_many_ties(data, num_pages, sinks, recents):
    budget = data.draw(st.integers(sinks + recents, sinks + recents + 12))
    # Few distinct values, so that most thresholds fall inside a run of equal scores.
    values = data.draw(st.lists(st.integers(-1, 1), min_size=num_pages, max_size=num_pages))
    padding = data.draw(st.integers(0, 5))
    scores = torch.tensor(values + [9] * padding, dtype=torch.float32)[None, None]
    held, wanted = torch.tensor([num_pages]), torch.tensor([min(num_pages, budget)])
    selected = reference.select_pages(scores, held, wanted, sinks, recents)
    expected = choose_pages(values, num_pages, budget, sinks, recents)
    assert selected[0, 0].tolist() == expected
    kept = reference.kept_pages(scores, held, wanted, int(wanted.max()), sinks, recents)
    assert kept.shape == scores.shape and kept[0, 0].nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_not_finite_ranks_last_and_nothing_past_the_end_is_chosen(value):
    scores = torch.tensor([[[0.0, value, -5.0, -1e30, 3.0, 0.0, 9.0, 9.0]]])
    selected = reference.select_pages(scores, torch.tensor([6]), torch.tensor([5]), 1, 1)
    assert selected[0, 0].tolist() == [0, 2, 3, 4, 5]


def int4_rule(page_size: int, pairs: Any = None, weights: Any = None) -> SelectionRule:
    return SelectionRule(
        landmark_tokens=int4_landmark_tokens(page_size),
        landmark_bits=4,
        landmark_pairs=pairs,
        group_score="best_head",
        layer_weights=weights,
    )


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pairs", [None, 3])
def test_step_equals_the_contract_by_int4_landmarks(
    pairs: int | None, heads: tuple, page_size: int
):
    chosen = None if pairs is None else chosen_pairs(4, heads[1], pairs, 16)
    rule = int4_rule(page_size, chosen, (9, 0.5, 1.25, 1.25))
    schedule = make_schedule(page_size, 4, [5, 6, 9]).model_copy(
        update={"selection": rule, "dense_layers": (0,)}
    )
    lengths = [1, 4 * page_size, 6 * page_size + 3, 9 * page_size, 15 * page_size - 1]
    pool = Pool(lengths, heads, head_dim=16, page_size=page_size, seed=page_size + heads[0])
    for layer in (1, 2):
        out = run_step(pool, schedule, 0.25, layer)
        for row, length in enumerate(lengths):
            budget = budget_pages(length, page_size, schedule.bin_tokens, schedule.budget_tokens)
            expected, _ = decode_one(
                pool.q[row].double().numpy(),
                pool.keys_of(row),
                pool.values_of(row),
                layer_budget(budget, rule.layer_weights[layer], least=3),
                page_size,
                0.25,
                store=lambda mean: mean.astype(np.float32).astype(np.float64),
                rule=rule,
                layer=layer,
            )
            np.testing.assert_allclose(out[row].numpy(), expected, atol=2e-6, err_msg=f"{length=}")


def test_the_published_rule_scores_bit_for_bit_by_the_mean_query_and_the_pages_mean():
    keys, q = torch.randn(30, 16, 3, 64), torch.randn(2, 9, 64)
    table = torch.randperm(30).view(2, 15)
    means = keys.mean(dim=1, dtype=torch.float32)
    mean_query = q.view(2, 3, 3, 64).mean(dim=2)
    expected = torch.einsum("bhd,bnhd->bhn", mean_query, means[table])
    assert torch.equal(reference.score_pages(q, reference.page_landmarks(keys), table), expected)


def test_int4_landmarks_are_packed_by_rotary_pair_and_rounded_half_to_even():
    """One head of 16 dimensions; the largest mean is 7, so the scale is 1 and codes are means."""
    keys = torch.zeros(1, 16, 1, 16)
    pairs = torch.arange(4, 8)[None]
    keys[0, :4, 0, 4:8] = torch.tensor([7.0, 0.5, 1.5, -2.5])
    keys[0, :4, 0, 12:16] = torch.tensor([-7.0, -0.5, 2.5, 3.4])
    keys[0, :, 0, :4] = 1e4
    landmarks = reference.page_landmarks(keys, pairs)
    assert landmarks.scales.dtype == torch.float16 and landmarks.scales.tolist() == [[[1, 0, 0, 0]]]
    codes = [(7, -7), (0, 0), (2, 2), (-2, 3)]
    packed = [first + 8 | (second + 8) << 4 for first, second in codes]
    assert landmarks.codes.tolist() == [[[packed, *[[0x88] * 4] * 3]]]
    assert landmarks.values()[0, 0, 0].tolist() == [7, 0, 2, -2, -7, 0, 2, 3]


def test_a_page_whose_keys_overflow_a_scale_ranks_last():
    keys = torch.randn(5, 16, 1, 8)
    keys[2] = 1e38
    landmarks = reference.page_landmarks(keys, torch.arange(4)[None])
    scores = reference.score_pages(torch.randn(1, 2, 8), landmarks, torch.arange(5)[None])
    assert scores.isfinite().tolist() == [[[True, True, False, True, True]]]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_bytes_of_landmarks_are_those_that_a_rule_announces(page_size: int, kv_dtype: torch.dtype):
    rules = [int4_rule(page_size), int4_rule(page_size, chosen_pairs(2, 3, 5, 16))]
    for rule in (SelectionRule(), *rules):
        pairs = kept_pairs(rule, 1, range(3), 16)
        held = allocate_landmarks(10, page_size, 3, 16, pairs, kv_dtype, "cpu")
        tensors = [tensor for name, tensor in held._asdict().items() if name != "pairs"]
        assert sum(tensor.nbytes for tensor in tensors) == 10 * 3 * rule.landmark_bytes(
            page_size, 16, mean_itemsize=2
        )
        computed = reference.page_landmarks(torch.ones(10, page_size, 3, 16).to(kv_dtype), pairs)
        assert [each.dtype for each in computed] == [each.dtype for each in held]
        assert [each.shape for each in computed] == [each.shape for each in held]


def test_a_request_in_a_batch_selects_and_attends_as_it_does_alone():
    lengths = [700, 33, 350, 1]
    schedule = make_schedule(16, 5, [4, 6, 8])
    pool = Pool(lengths, (9, 3), head_dim=16, page_size=16, seed=3)
    together = run_step(pool, schedule, 0.25)
    for row in range(len(lengths)):
        step = TorchPagedDecode(budgets_of(schedule, pool), pool.req_to_token)
        landmarks = landmarks_of(pool, schedule)
        one = slice(row, row + 1)
        step.plan_extend(pool.rows[one], pool.lengths[one], pool.lengths[one])
        step.update_landmarks(pool.k, landmarks)
        step.plan_decode(pool.rows[one], pool.lengths[one], pool.lengths[one])
        alone = step.decode(pool.q[one], pool.k, pool.v, landmarks, 0, 0.25)
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", [SelectionRule(), int4_rule(16)], ids=str)
def test_an_fp8_pool_stands_for_its_numbers_times_the_scales_of_the_layer(rule: SelectionRule):
    schedule = make_schedule(16, 3, [3, 4, 6]).model_copy(update={"selection": rule})
    lengths, k_scale, v_scale = [40, 150, 144, 7], 0.5, 1.7
    pool = Pool(lengths, (6, 2), head_dim=16, page_size=16, seed=1)
    pool.k, pool.v = (x.to(torch.float8_e4m3fn) for x in (pool.k, pool.v))
    out = run_step(pool, schedule, 0.25 * k_scale, v_scale=v_scale)
    for row, length in enumerate(lengths):
        expected, _ = decode_one(
            pool.q[row].double().numpy(),
            pool.keys_of(row) * k_scale,
            pool.values_of(row) * v_scale,
            budget_pages(length, 16, schedule.bin_tokens, schedule.budget_tokens),
            16,
            0.25,
            # The scale is a power of two, so that means are rounded alike with it and without.
            store=lambda mean: torch.from_numpy(mean).bfloat16().double().numpy(),
            rule=rule,
        )
        np.testing.assert_allclose(out[row].numpy(), expected, atol=4e-6, err_msg=f"{length=}")


def test_a_landmark_is_rounded_to_the_kv_dtype_only_after_the_mean():
    keys = torch.randn(7, 16, 3, 8, dtype=torch.bfloat16) + 100
    landmarks = reference.page_landmarks(keys).means.squeeze(2)
    assert landmarks.dtype == torch.bfloat16
    exact = keys.double().mean(1)
    # Half a bf16 unit in the last place at 100 is 0.25; a bf16 running sum would be off by more.
    assert (landmarks.double() - exact).abs().max() <= 0.25 + 1e-4
