"""The paper's formulas by hand, and the step model by hand and against loops."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contract import budget_pages, choose_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import GROUPED, MODELS, qwen

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.cost_model import (
    GPUS,
    paper_costs,
    rollout_costs,
    step_costs,
    tokens_read_by_length,
)
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

SIZES = ("1.7b", "4b", "8b", "14b")

# P = 4 * (2 * 2 * (2 + 2) + 3 * 4) + 5 * 4 = 112 + 20 = 132. D = 2 * 2 * 2 * 1 = 8, r = 1.
PLAIN = ModelShape(
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=5,
)


class TestShape:
    def test_parameters_width_and_ratio_by_hand(self) -> None:
        assert (GROUPED.parameters, GROUPED.kv_width, GROUPED.gqa_ratio) == (1616, 32, 2.0)
        assert (PLAIN.parameters, PLAIN.kv_width, PLAIN.gqa_ratio) == (132, 8, 1.0)

    @pytest.mark.parametrize(
        ("size", "billions"), [("1.7b", 1.72), ("4b", 4.02), ("8b", 7.57), ("14b", 13.99)]
    )
    def test_qwen_parameters(self, size: str, billions: float) -> None:
        # As published (1.7, 4.0, 8.2, 14.8 billion), less the input embedding where it is untied.
        assert qwen(size).parameters / 1e9 == pytest.approx(billions, abs=0.01)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": None}, "hidden_size=None"),
            ({"vocab_size": "many"}, "vocab_size='many'"),
            ({"n_routed_experts": 64}, "n_routed_experts=64"),
            ({"num_experts": 8}, "num_experts_per_tok=None"),
            ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
            ({"full_attention_interval": 4, "layer_types": None}, "linear_num_key_heads=None"),
            ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096"),
            ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types="),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None"),
        ],
    )
    def test_refuses_models_that_the_formulas_do_not_cover(
        self, change: dict[str, Any], message: str
    ) -> None:
        config = json.loads((MODELS / "qwen3-4b" / "config.json").read_text())
        with pytest.raises(InputError, match=message):
            ModelShape.from_config(config | change)


class TestPaperFormulas:
    def test_grouped_heads_by_hand(self) -> None:
        # 2 * 1616 * 2 * 10 = 64,640; 2 * (2 * 60 + 10) * 10 * 2 * 32 = 166,400.
        # 2 * 60 * 10 * 32 = 38,400; 2 * 10^2 * 32 = 6,400.
        dense = paper_costs(GROUPED, 60, [10], samples=2)
        assert (dense.flops, dense.bytes) == (231_040, 44_800)
        assert dense.eflops(5) == 231_040 + 5 * 44_800
        # Four pages of 16: all of 61 to 64 tokens, then three whole pages and 1 to 6 tokens.
        schedule = BudgetSchedule.fixed(64)
        assert tokens_read_by_length(schedule, 60, [10, 1]).tolist() == [250 + 309, 61]
        # 64,640 + 2 * 2 * 2 * 32 * 559 = 143,104; 2 * 2 * 32 * 559 = 71,552 bytes. Scoring:
        # 2 * 2 * 60 * 32 * 10 = 76,800; 2 * 2 * 32 * 10^2 / (2 * 16) = 400 FLOPs;
        # 2 * 60 * 32 * 10 = 38,400; 2 * 32 * 10^2 / (2 * 16) = 200 bytes.
        sparse = paper_costs(GROUPED, 60, [10], 2, schedule)
        assert (sparse.flops, sparse.bytes) == (64_640 + 143_104 + 77_200, 71_552 + 38_600)
        both = paper_costs(GROUPED, 60, [10, 10], 2, schedule)
        assert (both.flops, both.bytes) == (2 * sparse.flops, 2 * sparse.bytes)

    @pytest.mark.parametrize("prompt", [0, 512])
    def test_dense_terms_are_the_sum_over_steps_under_the_documented_reading(
        self, prompt: int
    ) -> None:
        shape, length = qwen("4b"), 3000
        paper = paper_costs(shape, prompt, [length], samples=1)
        steps = rollout_costs(shape, prompt, [length], batch=1)
        # The sum of 1..L is L^2 / 2 + L / 2; the paper's integral has no L / 2.
        half = shape.kv_width * length
        linear = 2 * shape.parameters * length
        assert float(steps.linear_flops) == linear
        assert float(steps.attention_flops) == pytest.approx(
            paper.flops - linear + shape.gqa_ratio * half
        )
        assert float(steps.kv_bytes) == pytest.approx(paper.bytes + half)

    def test_sparse_terms_are_the_sum_over_steps_without_dense_layers(self) -> None:
        shape, length = qwen("1.7b"), 8192
        schedule = BudgetSchedule(
            name="s", page_size=16, bin_tokens=64, budget_tokens=(48, 64, 112), dense_layers=()
        )
        paper = paper_costs(shape, 0, [length], 1, schedule)
        steps = rollout_costs(shape, 0, [length], batch=1, schedule=schedule)
        # A landmark is half of D wide, 2 bytes a value: D bytes for each of c / p landmarks.
        landmarks = sum(shape.kv_width * cached / 16 for cached in range(1, length + 1))
        assert float(steps.kv_bytes) == pytest.approx(paper.bytes - landmarks, rel=2 / length)
        assert float(steps.linear_flops + steps.attention_flops) == pytest.approx(
            paper.flops - shape.gqa_ratio * landmarks, rel=2 / length
        )

    @pytest.mark.parametrize("gpu", ["a100", "h200"])
    def test_speedup_of_the_published_schedules_falls_with_model_size(self, gpu: str) -> None:
        """At the published setting: 32K cut-off, 8 samples per prompt."""
        speedups = []
        for size in SIZES:
            dense, sparse = (
                paper_costs(qwen(size), 512, [32768], 8, schedule).eflops(GPUS[gpu].intensity)
                for schedule in (None, load_schedule(f"qwen3-{size}-0.86", 16))
            )
            speedups.append(dense / sparse)
        assert speedups == sorted(speedups, reverse=True)
        assert speedups[0] > 1.4 * speedups[-1]

    def test_a_budget_beyond_the_sequence_costs_what_dense_costs(self) -> None:
        shape, schedule = qwen("1.7b"), BudgetSchedule.fixed(65536)
        dense = rollout_costs(shape, 100, [5000], batch=4)
        same = rollout_costs(shape, 100, [5000], batch=4, schedule=schedule)
        assert float(same.bytes) == float(dense.bytes)
        assert float(same.flops) == float(dense.flops)


class TestStepModel:
    @settings(max_examples=150, deadline=None)
    @given(
        st.sampled_from([16, 32, 64]),
        st.integers(1, 6),
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
        st.integers(1, 2000),
    )
    def test_tokens_read_are_those_of_the_kept_pages(
        self, page: int, bin_pages: int, growth: list[int], length: int
    ) -> None:
        budgets = [(3 + sum(growth[: i + 1])) * page for i in range(len(growth))]
        schedule = BudgetSchedule(
            name="s", page_size=page, bin_tokens=bin_pages * page, budget_tokens=tuple(budgets)
        )
        pages = -(-length // page)
        budget = budget_pages(length, page, bin_pages * page, budgets)
        kept = choose_pages([0.0] * pages, pages, budget, sinks=1, recents=2)
        held = [min(page, length - index * page) for index in kept]
        assert schedule.tokens_read([length]).tolist() == [sum(held)]

    def test_one_step_by_hand(self) -> None:
        schedule = BudgetSchedule(
            name="s", page_size=16, bin_tokens=16, budget_tokens=(64,), dense_layers=(0, 5)
        )
        # 100 tokens are 7 pages, the last one short of 12; a budget of 4 pages reads 64 - 12 = 52.
        # Layer 0 reads 100 (the model has no layer 5), layer 1 reads 52; a layer's share of D is
        # 16. The 4 pages between 1 sink and 2 recent pages are scored.
        cost = step_costs(GROUPED, [100], batch=8, schedule=schedule)
        assert cost.weight_bytes[0] == 2 * 1616 / 8
        assert cost.kv_bytes[0] == 2 * 16 * 152
        assert cost.scoring_bytes[0] == 16 * 4
        assert cost.linear_flops[0] == 2 * 1616
        assert cost.attention_flops[0] == 2 * 2 * 16 * 152
        assert cost.scoring_flops[0] == 16 * 4

    def test_one_step_with_sliding_windows_by_hand(self) -> None:
        # Three layers, a layer's share of D is 16; layers 0 and 2 read at most 24 tokens.
        windows = replace(GROUPED, num_layers=3, window_layers=(0, 2), window_tokens=24)
        assert windows.kv_width == 16
        dense = step_costs(windows, [20, 100], batch=8)
        assert dense.kv_bytes.tolist() == [2 * 16 * 3 * 20, 2 * 16 * (100 + 2 * 24)]
        # As above, layer 1 reads 52 of 100 tokens and scores 4 pages. Layer 0 is dense either way.
        for layers in ((0,), (0, 2)):
            schedule = BudgetSchedule.fixed(64).model_copy(update={"dense_layers": layers})
            sparse = step_costs(windows, [100], batch=8, schedule=schedule)
            assert sparse.kv_bytes[0] == 2 * 16 * (52 + 2 * 24)
            assert sparse.scoring_bytes[0] == 16 * 4

    def test_one_step_under_a_selection_rule_by_hand(self) -> None:
        rule = {"landmark_tokens": 4, "landmark_bits": 4, "group_score": "best_head"}
        schedule = BudgetSchedule(
            name="s",
            page_size=16,
            bin_tokens=16,
            budget_tokens=(64,),
            dense_layers=(),
            selection=rule | {"layer_weights": [0.75, 1.25]},
        )
        cost = step_costs(GROUPED, [75, 100], batch=8, schedule=schedule)
        # Budgets of 3 and 5 pages. 5 pages are sparse in layer 0 alone, 7 in both.
        assert cost.kv_bytes.tolist() == [2 * 16 * (43 + 75), 2 * 16 * (36 + 68)]
        heads, dim = GROUPED.num_kv_heads, GROUPED.head_dim
        pages = np.array([1 * 2, 2 * 4])
        assert cost.scoring_bytes.tolist() == (pages * heads * 4 * (dim // 2 + 2)).tolist()
        assert cost.scoring_flops.tolist() == (pages * heads * 2 * 4 * 2 * dim).tolist()

    def test_within_the_budget_nothing_is_scored(self) -> None:
        schedule = BudgetSchedule.fixed(64)
        # Both layers of the small model are dense ones.
        cost = step_costs(GROUPED, [63, 64, 65], batch=1, schedule=schedule)
        assert (cost.scoring_bytes > 0).tolist() == [False, False, False]
        wide = step_costs(qwen("1.7b"), [63, 64, 65], batch=1, schedule=schedule)
        assert (wide.scoring_bytes > 0).tolist() == [False, False, True]

    def test_rollout_is_the_sum_over_requests_and_steps(self) -> None:
        shape, schedule = qwen("1.7b"), BudgetSchedule.fixed(128)
        lengths = [5, 300, 41, 300, 1]
        total = rollout_costs(shape, 100, lengths, batch=4, schedule=schedule)
        by_loop = 0.0
        for length in lengths:
            for step in range(1, length + 1):
                one = step_costs(shape, [100 + step], batch=4, schedule=schedule)
                by_loop += float(one.eflops(206)[0])
        assert float(total.eflops(206)) == pytest.approx(by_loop, rel=1e-12)

    def test_refuses_lengths_and_batches_that_are_none(self) -> None:
        with pytest.raises(InputError, match="at least one length"):
            rollout_costs(PLAIN, 10, [], batch=1)
        with pytest.raises(InputError, match=r"output_lengths=\[0, 5\]"):
            rollout_costs(PLAIN, 10, [5, 0], batch=1)
        with pytest.raises(InputError, match="batch=0"):
            step_costs(PLAIN, [1], batch=0)
