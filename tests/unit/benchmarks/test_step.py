"""`sparrow bench step` without a GPU: bytes, cases, comparisons, wrong options, failing engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import refusal

from sparrow_sglang.benchmarks import step
from sparrow_sglang.benchmarks.common import known_models, tokens_per_round
from sparrow_sglang.benchmarks.step import (
    batch_lengths,
    compare,
    model_shape,
    routes_alike,
    step_bytes,
    time_steps,
)
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedule import BudgetSchedule

ROOT = Path(__file__).parents[3]


def row(backend: str, step_ms: float, case: str = "2x1000", **fields: Any) -> dict[str, Any]:
    return {
        "model": "qwen3-4b",
        "backend": backend,
        "case": case,
        "step_ms": step_ms,
        "prefill_s": 1.0,
        "schedule": "fixed-512" if backend == "sparrow" else None,
        "floor_ms": 1.0,
    } | fields


# -- bytes and cases


def test_bytes_of_a_step_by_hand() -> None:
    shape = ModelShape(
        8, 16, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=4, vocab_size=10
    )
    # Per layer q and o: 2 * 8 * 16, k and v: 2 * 8 * 8, MLP: 3 * 8 * 16; vocabulary: 10 * 8.
    layers, vocabulary = 3 * (256 + 128 + 384), 80
    weights = 2 * (layers + vocabulary)
    # A token's KV in one layer: 2 heads * 4 wide * keys and values * 2 bytes.
    kv = 32
    assert step_bytes(shape, [100, 40], None) == weights + 3 * 140 * kv
    fp8_weights = step_bytes(shape, [100, 40], None, quantization="fp8")
    assert fp8_weights == layers + 2 * vocabulary + 3 * 140 * kv
    # Budget of 4 pages, layers 0 and 1 dense. 100 tokens are 7 pages: 3 full ones and the last with
    # 4 tokens are read, and 7 - 1 - 2 landmarks of half a token's KV; 40 tokens are read in full.
    sparse = (3 * 16 + 4 + 40) * kv + 4 * kv // 2
    schedule = BudgetSchedule.fixed(64)
    assert step_bytes(shape, [100, 40], schedule) == weights + 2 * 140 * kv + sparse
    # An FP8 cache has KV of half the size, and landmarks of the same size.
    halved = replace(shape, kv_itemsize=1)
    landmarks = 4 * kv // 2
    fp8 = weights + (2 * 140 * kv + sparse - landmarks) / 2 + landmarks
    assert step_bytes(halved, [100, 40], schedule) == fp8


def test_a_floor_counts_the_experts_that_dummy_weights_choose() -> None:
    assert [model for model in known_models() if routes_alike(model)] == ["gpt-oss-20b"]
    shape, lengths = model_shape("gpt-oss-20b"), [32768] * 16
    even = step_bytes(shape, lengths, None)
    same = step_bytes(shape, lengths, None, same_experts=True)
    # In each of 24 layers, 4 of 32 experts instead of the expected 32 * (1 - (1 - 4/32)^16).
    experts = 24 * (32 * (1 - (7 / 8) ** 16) - 4)
    assert even - same == pytest.approx(2 * 3 * 2880 * 2880 * experts)


def test_cases() -> None:
    assert batch_lengths("3x1000") == [1000] * 3
    lengths = batch_lengths("fill:1024-8192:100000")
    assert lengths == batch_lengths("fill:1024-8192:100000")
    assert 1024 <= min(lengths) < 3000 and 6000 < max(lengths) <= 8192
    assert 100_000 - 2 * 8192 < sum(lengths) <= 100_000


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("16x", "expected BATCHxLENGTH or fill"),
        ("0x1000", "1 or more sequences"),
        ("1x144", "lengths of 145 to 131072"),
        ("1x131073", "lengths of 145 to 131072"),
        ("fill:2000-1000:90000", "lengths of 145"),
        ("fill:1000-2000:2000", "1 or more sequences"),
    ],
)
def test_nonsense_cases_are_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"case {case!r}.*{message}"):
        batch_lengths(case)


# -- timing and comparing


class Engine:
    """A clock in place of an engine: prefill takes 100 s, cached or not 1 s, a step 2 s.

    `waves` are the batches in which it decodes the sequences that are sent together.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waves: int = 1) -> None:
        self.now, self.cached, self.waves = 0.0, False, waves
        monkeypatch.setattr(step.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(step, "connect", lambda engine: engine)

    def generate(self, input_ids: Any, sampling_params: dict[str, Any]) -> list[Any]:
        start = self.now
        self.now += 1 if self.cached else 100
        self.cached = True
        ended = []
        for wave in range(self.waves):
            self.now += 2 * sampling_params["max_new_tokens"]
            ended += [self.now - start] * len(input_ids[wave :: self.waves])
        return [{"meta_info": {"e2e_latency": seconds}} for seconds in ended]

    def flush_cache(self, timeout_s: float) -> None:
        self.cached = False


def test_steps_of_sequences_that_waited_for_each_other_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="3 sequences did not decode together"):
        time_steps(Engine(monkeypatch, waves=2), [1000] * 3, 50_000, repeats=1)


def test_a_step_is_timed_without_prefill_and_prefill_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = time_steps(Engine(monkeypatch), [1000, 500], 50_000, repeats=2)
    assert measured["step_ms"] == 2000 and measured["prefill_s_all"] == [102, 102]
    assert (measured["batch"], measured["cached_tokens"]) == (2, 1500)


def test_tokens_of_a_round_follow_from_the_acceptance_rate() -> None:
    assert tokens_per_round(4, 1.0) == 5
    assert tokens_per_round(8, 0.9) == pytest.approx((1 - 0.9**9) / (1 - 0.9))


def test_sparse_rows_are_compared_with_the_fastest_dense_row_of_model_and_case() -> None:
    rows = [
        row("flashinfer", 9.0, prefill_s=3.0),
        row("fa3", 8.0, prefill_s=4.0),
        row("fa3", 1.0, model="qwen3-8b"),
        row("fa3", 2.0, case="4x1000"),
        row("sparrow", 4.0, prefill_s=6.0),
        row("sparrow", 2.0, schedule="fixed-1024"),
        row("sparrow", 3.0, case="8x1000"),
    ]
    first, second = compare(rows)
    assert (first["dense"], first["speedup"]) == ("fa3", 2.0)
    assert (first["dense_prefill"], first["prefill_speedup"]) == ("flashinfer", 0.5)
    assert (second["schedule"], second["speedup"]) == ("fixed-1024", 4.0)


# -- command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ep 2", "--ep 2: expected 1, or the GPUs of --tp 1"),
        ("--tp 2 --ep 2", "--ep 2: qwen3-1.7b has no experts"),
        ("--tp 3", "3 tensor-parallel ranks: 8 KV heads cannot be shared"),
        ('--engine-args {"tp_size":2}', "--engine-args tp_size: set --tp instead"),
        ("--models qwen3-30b-a3b", "qwen3-30b-a3b-0.86"),
        ('--engine-args {"kv_cache_dtype":"fp8_e5m2"}', "kv_cache_dtype='fp8_e5m2'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(["bench", "step", *options.split()], capsys)
