"""`sparrow bench step` without a GPU: timing and comparisons."""

from typing import Any

import pytest

from sparrow_sglang.benchmarks import step
from sparrow_sglang.benchmarks.common import tokens_per_round
from sparrow_sglang.benchmarks.step import steps_table, time_steps


def row(backend: str, step_ms: float, case: str = "2x1000", **fields: Any) -> dict[str, Any]:
    return {
        "model": "qwen3-4b",
        "backend": backend,
        "case": case,
        "step_ms": step_ms,
        "schedule": "fixed-512" if backend == "sparrow" else None,
    } | fields


# -- timing and comparing


class Engine:
    """A clock in place of an engine: prefill takes 100 s, cached or not 1 s, a step 2 s. `waves`
    are the batches in which it decodes the sequences that are sent together."""

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
        time_steps(Engine(monkeypatch, waves=2), 3, 1000, 50_000, repeats=1)


def test_a_step_is_timed_without_prefill_and_prefill_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = time_steps(Engine(monkeypatch), 2, 750, 50_000, repeats=2)
    assert measured["step_ms"] == 2000 and measured["prefill_s_all"] == [102, 102]
    assert (measured["batch"], measured["cached_tokens"]) == (2, 1500)


def test_tokens_of_a_round_follow_from_the_acceptance_rate() -> None:
    assert tokens_per_round(4, 1.0) == 5
    assert tokens_per_round(8, 0.9) == pytest.approx((1 - 0.9**9) / (1 - 0.9))


def test_sparse_rows_are_compared_with_the_fastest_dense_row_of_model_and_case() -> None:
    rows = [
        row("flashinfer", 9.0),
        row("fa3", 8.0),
        row("fa3", 1.0, model="qwen3-8b"),
        row("fa3", 2.0, case="4x1000"),
        row("sparrow", 4.0),
        row("sparrow", 2.0, schedule="fixed-1024"),
        row("sparrow", 3.0, case="8x1000"),
    ]
    lines = steps_table(rows).split("\n\n")[0].splitlines()[1:]
    assert [line.split()[2:] for line in lines] == [
        ["8.00", "fixed-512", "4.00", "2.00x"],
        ["8.00", "fixed-1024", "2.00", "4.00x"],
    ]
