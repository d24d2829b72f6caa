"""Bytes and arithmetic of a step by hand and in transformers; predicted times against the measured
ones in benchmarks/results, to which they are fitted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning import step_time
from sparrow_sglang.planning.fit import fit, measured_steps
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.rounds import DENSE, plans
from sparrow_sglang.planning.step_time import (
    ASSUMED,
    GPUS,
    Acceptance,
    Gpu,
    constants,
    fits,
    kv_bytes,
    milliseconds,
    predict,
    round_terms,
    step_terms,
)
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# A layer has 8 * (4 * 2 * (4 + 2) + 3 * 16) = 8 * 96 = 768 weights, two have 1536, the
# vocabulary projection 10 * 8 = 80: 1616. A token has 2 * 2 * 4 = 16 numbers in a layer's KV.
TINY = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=10,
)
# A byte takes a millisecond, 20 operations too.
SLOW = Gpu(bandwidth=1e3, flops=2e4, memory=1e4, fp8=True)


def config(model: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((BENCHMARKS / "models" / model / "config.json").read_text())
    return fields


class TestFit:
    def test_constants_are_those_of_the_committed_results(self) -> None:
        again = "run python -m sparrow_sglang.planning.fit benchmarks/results"
        assert constants() == fit(measured_steps(BENCHMARKS / "results")), again

    def test_predictions_are_close_to_measured_steps_of_each_kind(self) -> None:
        steps = measured_steps(BENCHMARKS / "results")
        errors = {step.name: abs(milliseconds(step.terms) / step.ms - 1) for step in steps}
        rounds = {name: error for name, error in errors.items() if name.endswith(" drafts")}
        dense = {name: error for name, error in errors.items() if name.endswith(" dense")}
        sparse = {n: e for n, e in errors.items() if n not in rounds and n not in dense}
        for kind in rounds, dense, sparse:
            assert len(kind) > 2
            shares = np.array(list(kind.values()))
            # Small steps wait for a host whose speed differs by more between runs.
            assert shares.mean() < 0.08 and np.mean(shares < 0.15) >= 0.9, kind
        assert max(errors.values()) < 0.3

    def test_a_dense_step_is_that_of_the_fastest_backend(self, tmp_path: Path) -> None:
        row = {"model": "qwen3-8b", "case": "1x1024", "schedule": None}
        rows = [row | {"step_ms": ms} for ms in (5, 4, 9)]
        # Steps that are not predicted.
        unlike = {"tp": 2}, {"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"}
        unlike += {"schedule": "removed"}, {"model": "qwen3-30b-a3b"}
        rows += [row | {"case": "2x2048", "step_ms": 1.0} | fields for fields in unlike]
        content = {"device": "NVIDIA H200", "rows": rows}
        (tmp_path / "models").symlink_to(BENCHMARKS / "models")
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "steps.json").write_text(json.dumps(content))
        assert [step.ms for step in measured_steps(tmp_path / "results")] == [4]


class TestTerms:
    def test_a_step_by_hand(self) -> None:
        # 1616 weights of 2 bytes take 3232 ms to read; 3 rows multiply 3 * 2 * 1616 / 20 = 484.8.
        # 3 * 100 tokens have 16 numbers of 2 bytes in both layers.
        assert step_terms(TINY, SLOW, 3, 100).tolist() == [3232, 19200, 2, 6]
        assert step_terms(TINY, SLOW, 3, 100, fp8=True).tolist() == [1616, 19200, 2, 6]
        # 30 rows multiply for 4848 ms, longer than reading takes.
        many = step_terms(TINY, SLOW, 3, 100, rows=10)
        assert many.tolist() == pytest.approx([4848, 19200, 2, 60])

    def test_sparse_kv_by_hand(self) -> None:
        schedule = BudgetSchedule(
            name="s", page_size=16, bin_tokens=16, budget_tokens=(64,), dense_layers=(0, 5)
        )
        # 100 tokens are 7 pages, the last one short of 12; a budget of 4 pages reads 64 - 12 = 52.
        # Layer 0 reads 100 (the model has no layer 5), layer 1 reads 52. The 4 pages between 1 sink
        # and 2 recent ones have landmarks: 2 heads of 4 numbers of 2 bytes.
        assert kv_bytes(TINY, 8, 100, schedule) == 8 * (2 * 16 * 152 + 4 * 16)
        assert kv_bytes(TINY, 8, 60, schedule) == kv_bytes(TINY, 8, 60)

    def test_a_round_is_its_drafts_and_one_pass_over_all_of_them(self) -> None:
        drafting = BudgetSchedule.fixed(64)
        draft = step_terms(TINY, SLOW, 4, 500, drafting, fp8=True)
        both = round_terms(TINY, SLOW, 4, 500, 3, 6, drafting, fp8=True)
        assert both.tolist() == (3 * draft + step_terms(TINY, SLOW, 4, 500, rows=6)).tolist()

    def test_memory_holds_weights_their_fp8_copies_and_kv(self) -> None:
        # 3 * 1616 bytes of weights, 64 of each token; 9000 of 10000 are usable.
        assert fits(TINY, SLOW, 1, 64) and not fits(TINY, SLOW, 1, 65)
        assert fits(TINY, SLOW._replace(fp8=False), 1, 90)


class TestRounds:
    def test_lossless_decoding_takes_the_fastest_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(step_time, "milliseconds", lambda terms: float(terms[:2].sum()))
        schedule = BudgetSchedule.fixed(64, dense_layers=())

        def best(*acceptance: float, most: int = 3) -> Any:
            rounds = plans(most + 1, looks_up=True)
            rates = Acceptance(*acceptance)
            return predict(TINY, SLOW, (1, 4000), rates, rounds, schedule, schedule)

        nothing, lookups, drafts, both = best(0, 0), best(0, 0.5), best(0.9, 0), best(0.9, 0.9)
        assert nothing.round == DENSE and nothing.lossless_ms == nothing.dense_ms
        # Reading dominates: four rows take as long as one.
        assert lookups.round == (0, 3, 4)
        assert lookups.lossless_ms == pytest.approx(lookups.dense_ms / (1 + 0.5 + 0.25 + 0.125))
        assert drafts.round == (3, 0, 4) and best(0.9, 0, most=1).round == (1, 0, 2)
        assert both.round == (0, 3, 4) and both.lossless_ms < drafts.lossless_ms
        assert nothing.sparse_ms < nothing.dense_ms

    @pytest.mark.parametrize("gpu", GPUS)
    @pytest.mark.parametrize("model", ["qwen2.5-coder-1.5b", "qwen3-14b"])
    def test_no_step_is_faster_for_more_sequences_or_tokens(self, model: str, gpu: str) -> None:
        shape, rounds = ModelShape.from_config(config(model)), plans(9, looks_up=True)
        schedules = BudgetSchedule.drafts(), load_schedule(f"{model}-0.86", 16)

        def predicted(batch: int, cached: int) -> tuple[float, float, float]:
            found = predict(shape, GPUS[gpu], (batch, cached), ASSUMED, rounds, *schedules)
            return found.dense_ms, found.lossless_ms, found.sparse_ms

        ms = [[predicted(1 << i, n * 1000) for n in range(1, 130, 4)] for i in range(9)]
        assert all((np.diff(ms, axis=axis) >= 0).all() for axis in (0, 1))


class TestShape:
    @pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
    def test_weights_are_those_of_transformers(self, kind: Any) -> None:
        fields = kind(num_key_value_heads=8, tie_word_embeddings=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(fields)
        matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
        shape = ModelShape.from_config(fields.to_dict())
        # Tokens are looked up in the input embedding, which is not read as a whole.
        assert shape.weights == matrices - fields.vocab_size * fields.hidden_size

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"hidden_size": None}, "hidden_size=None"),
            ({"vocab_size": "many"}, "vocab_size='many'"),
            ({"n_routed_experts": 64}, "n_routed_experts=64"),
            ({"num_experts": 8}, "num_experts=8"),
            ({"num_local_experts": 8}, "num_local_experts=8"),
            ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
            ({"full_attention_interval": 4, "layer_types": None}, "full_attention_interval=4"),
            ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ],
    )
    def test_models_whose_steps_were_not_measured_are_refused(
        self, change: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(InputError, match=field):
            ModelShape.from_config(config("qwen3-4b") | change)
