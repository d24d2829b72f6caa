"""Bytes of a step by hand and against loops; predicted times against measured ones."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shapes import GROUPED, MODELS, qwen

from sparrow_sglang.benchmarks.step import model_shape
from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import (
    VERIFICATION,
    constants,
    fp8_pays,
    lossless_ms,
    step_bytes,
    step_terms,
    step_time,
)
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def measured_rows() -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Rows that the constants were fitted to, and the terms of each; without those whose schedule
    was removed with its selection rule."""
    for file in constants()["fitted_to"]:
        content = json.loads((RESULTS / file).read_text())
        for row in content["rows"]:
            spec = row["schedule"] or ""
            path = ROOT / spec
            if spec.endswith(".json") and not path.exists():
                continue
            shape = model_shape(row["model"], row.get("kv_cache_dtype") or "auto")
            schedule = load_schedule(str(path) if path.is_file() else spec, 16) if spec else None
            size = row["batch"], row["cached_tokens"] // row["batch"]
            yield row, step_terms(shape, Path(file).parent.name, *size, schedule)


class TestTimes:
    def test_predictions_are_within_15_percent_of_measured_steps(self) -> None:
        rows = list(measured_rows())
        assert len(rows) > 30 and {row["schedule"] is None for row, _ in rows} == {True, False}
        ms = constants()["ms"]
        predicted = [sum(ms[name] * value for name, value in terms.items()) for _, terms in rows]
        errors = np.abs(np.array(predicted) / [row["step_ms"] for row, _ in rows] - 1)
        # Short contexts scatter by more within one run, those of linear attention by a third.
        linear = np.array([terms["linear_layers"] > 0 for _, terms in rows])
        others = errors[~linear]
        assert others.max() < 0.2 and np.mean(others < 0.15) > 0.95 and errors.max() < 0.35

    def test_predicted_rounds_with_fp8_drafts_are_within_15_percent_of_measured_ones(self) -> None:
        files = (RESULTS / "h200").glob("decode_step_qwen3-8b_fp8_drafts*.json")
        rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
        rounds = [row for row in rows if row["schedule"]]
        assert len(rounds) == 8
        schedule = BudgetSchedule.drafts(16)
        for row in rounds:
            batch, cached = map(int, row["case"].split("x"))
            dense = step_time(qwen("8b"), "h200", batch, cached).total
            draft = step_time(qwen("8b"), "h200", batch, cached, schedule, fp8_weights=True).total
            predicted = row["drafts"] * draft + VERIFICATION * dense
            assert predicted == pytest.approx(row["round_ms"], rel=0.15), row["case"]

    def test_fp8_drafts_pay_for_large_models_on_gpus_that_have_fp8(self) -> None:
        assert all(fp8_pays(qwen(size), "h200") for size in ("1.7b", "8b"))
        smaller = model_shape("qwen2.5-coder-1.5b", "auto")
        assert not fp8_pays(qwen("8b"), "a100") and not fp8_pays(smaller, "h200")

    def test_within_the_budget_sparse_takes_what_dense_takes(self) -> None:
        schedule = BudgetSchedule.fixed(65536)
        dense = step_time(qwen("1.7b"), "h200", 16, 32768)
        assert step_time(qwen("1.7b"), "h200", 16, 32768, schedule) == dense

    def test_a_round_of_drafts_by_counting(self) -> None:
        # Tokens of a round: each draft counts if it and all before it are accepted, and one more.
        a, dense, sparse = 0.8, 10.0, 2.0
        rounds = {k: 1 + sum(a**i for i in range(1, k + 1)) for k in range(1, 9)}
        expected = {k: (k * sparse + 1.2 * dense) / tokens for k, tokens in rounds.items()}
        ms, drafts = lossless_ms(dense, sparse, a, 8)
        assert drafts == min(expected, key=lambda k: expected[k])
        assert ms == pytest.approx(expected[drafts])


class TestBytes:
    def test_one_step_by_hand(self) -> None:
        schedule = BudgetSchedule(
            name="s", page_size=16, bin_tokens=16, budget_tokens=(64,), dense_layers=(0, 5)
        )
        # 100 tokens are 7 pages, the last one short of 12; a budget of 4 pages reads 64 - 12 = 52.
        # Layer 0 reads 100 (the model has no layer 5), layer 1 reads 52; a token has 16 values of 2
        # bytes in a layer. The 4 pages between 1 sink and 2 recent pages are scored.
        moved = step_bytes(GROUPED, 8, 100, schedule)
        assert moved.weights == 2 * 1616
        assert moved.kv == 8 * 2 * 16 * 152
        assert moved.landmarks == 8 * 16 * 4
        assert (moved.read, moved.scored) == (76, 4)
        dense = step_bytes(GROUPED, 2, 100)
        assert dense.kv == 2 * 16 * 2 * 200 and dense.landmarks == 0

    def test_one_step_with_sliding_windows_by_hand(self) -> None:
        # Three layers; layers 0 and 2 read at most 24 tokens.
        windows = replace(GROUPED, num_layers=3, window_layers=(0, 2), window_tokens=24)
        assert step_bytes(windows, 1, 20).kv == 2 * 16 * 3 * 20
        assert step_bytes(windows, 1, 100).kv == 2 * 16 * (100 + 2 * 24)
        # As above, layer 1 reads 52 of 100 tokens and scores 4 pages. Layer 0 is dense either way.
        for layers in ((0,), (0, 2)):
            schedule = BudgetSchedule.fixed(64).model_copy(update={"dense_layers": layers})
            sparse = step_bytes(windows, 1, 100, schedule)
            assert sparse.kv == 2 * 16 * (52 + 2 * 24)
            assert sparse.landmarks == 16 * 4

    def test_a_step_reads_and_writes_states_of_linear_attention(self) -> None:
        config = json.loads((MODELS / "qwen3.5-9b" / "config.json").read_text())
        shape = ModelShape.from_config(config)
        assert shape.linear is not None
        assert step_bytes(shape, 4, 100).states == 4 * shape.linear.moved_bytes
        one, two = (step_bytes(shape, 1, n).kv for n in (1000, 2000))
        assert two == 2 * one == 2 * 1000 * 2 * shape.layer_kv_width * shape.whole_layers


class TestShape:
    @pytest.mark.parametrize(
        ("change", "field"),
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
    def test_refuses_models_that_are_not_covered(self, change: dict[str, Any], field: str) -> None:
        config = json.loads((MODELS / "qwen3-4b" / "config.json").read_text())
        with pytest.raises(InputError, match=field):
            ModelShape.from_config(config | change)
