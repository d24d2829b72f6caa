"""The torch step against the float64 loop of `contract.py`, at every kind of boundary."""

import numpy as np
import pytest
import torch
from contract import choose_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import StepCase

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.landmarks import allocate_landmarks
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.schedules.schedule import INT4, RULES, SelectionRule, landmark_bytes

FP32 = [(torch.float32, torch.float32)] * 3 + [(torch.float32, torch.float8_e4m3fn)]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_step_equals_the_contract(first: int) -> None:
    for seed in range(first, first + 10):
        case = StepCase.draw(seed, [16], FP32).on("cpu")
        step = TorchPagedDecode(case.budgets, case.pool.req_to_token)
        for layer, out in enumerate(case.run(step)):
            for row in range(len(out)):
                want = case.expected(layer, row)
                np.testing.assert_allclose(out[row].numpy(), want, atol=4e-6, err_msg=f"{seed=}")


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(), num_pages=st.integers(1, 40), sinks=st.integers(0, 3), recents=st.integers(1, 4)
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


def test_int4_landmarks_are_packed_by_rotary_pair_and_rounded_half_to_even():
    """One head of 8 dimensions; the largest mean is 7, so the scale is 1 and codes are means."""
    keys = torch.zeros(1, 16, 1, 8)
    keys[0, :4, 0] = torch.tensor([7.0, 0.5, 1.5, -2.5, -7.0, -0.5, 2.5, 3.4])
    landmarks = reference.page_landmarks(keys, int4=True)
    assert landmarks.scales.dtype == torch.float16 and landmarks.scales.tolist() == [[[1, 0, 0, 0]]]
    codes = [(7, -7), (0, 0), (2, 2), (-2, 3)]
    packed = [first + 8 | (second + 8) << 4 for first, second in codes]
    assert landmarks.codes.tolist() == [[[packed, *[[0x88] * 4] * 3]]]
    assert landmarks.values()[0, 0, 0].tolist() == [7, 0, 2, -2, -7, 0, 2, 3]


def test_a_page_whose_keys_overflow_a_scale_ranks_last():
    keys = torch.randn(5, 16, 1, 8)
    keys[2] = 1e38
    landmarks = reference.page_landmarks(keys, int4=True)
    scores = reference.score_pages(torch.randn(1, 2, 8), landmarks, torch.arange(5)[None])
    assert scores.isfinite().tolist() == [[[True, True, False, True, True]]]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_bytes_of_landmarks_are_those_that_a_rule_announces(
    page_size: int, rule: SelectionRule, kv_dtype: torch.dtype
) -> None:
    held = allocate_landmarks(10, page_size, 3, 16, kv_dtype, "cpu", rule == INT4)
    of_page = landmark_bytes(rule, page_size, 16, mean_itemsize=2)
    assert sum(tensor.nbytes for tensor in held) == 10 * 3 * of_page
    keys = torch.ones(10, page_size, 3, 16).to(kv_dtype)
    computed = reference.page_landmarks(keys, rule == INT4)
    assert [each.dtype for each in computed] == [each.dtype for each in held]
    assert [each.shape for each in computed] == [each.shape for each in held]


def test_a_landmark_is_rounded_to_the_kv_dtype_only_after_the_mean():
    keys = torch.randn(7, 16, 3, 8, dtype=torch.bfloat16) + 100
    landmarks = reference.page_landmarks(keys).means.squeeze(2)
    assert landmarks.dtype == torch.bfloat16
    exact = keys.double().mean(1)
    # Half a bf16 unit in the last place at 100 is 0.25; a bf16 running sum would be off by more.
    assert (landmarks.double() - exact).abs().max() <= 0.25 + 1e-4
