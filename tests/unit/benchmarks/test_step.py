"""`sparrow bench step` without a GPU: timing and comparisons."""

from typing import Any

import pytest

from sparrow_sglang.benchmarks import step
from sparrow_sglang.benchmarks.step import random_prompts, steps_table, time_prefills, time_steps


def row(backend: str, step_ms: float, case: str = "2x1000", **fields: Any) -> dict[str, Any]:
    return {
        "model": "qwen3-4b",
        "backend": backend,
        "case": case,
        "step_ms": step_ms,
        "schedule": "fixed-512" if backend == "sparrow" else None,
    } | fields


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
    prompts = random_prompts(3, 1000, 50_000)
    with pytest.raises(RuntimeError, match="3 sequences did not decode together"):
        time_steps(Engine(monkeypatch, waves=2), prompts, repeats=1)


def test_a_step_is_timed_without_prefill_and_prefill_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, prompts = Engine(monkeypatch), random_prompts(2, 750, 50_000)
    assert time_prefills(engine, prompts, 0) == {"first_prefill_s": 102}
    assert time_prefills(engine, prompts, 2)["prefill_s_all"] == [102, 102]
    assert time_steps(engine, prompts, 2)["step_ms"] == 2000


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
    cells = [line.split() for line in steps_table(rows).split("\n\n")[0].splitlines()]
    assert [line[2:] for line in cells if "4b" in line[0] and "fixed" in line[3]] == [
        ["8.00", "fixed-512", "4.00", "2.00x"],
        ["8.00", "fixed-1024", "2.00", "4.00x"],
        ["none", "fixed-512", "3.00"],
    ]


def test_rounds_are_compared_by_the_tokens_that_the_rates_give_and_by_both_clocks() -> None:
    rounds = row("sparrow", 2.0, schedule="drafts", drafts=1, lookups=1, round_ms=4.0)
    rounds |= {"lookup_acceptance": 0.5, "device_ms": 3.5}
    stock = row("fa3", 8.0, side="stock", device_ms=7.25)
    lines = steps_table([stock, row("fa3", 9.0), rounds]).split("\n\n")[0].splitlines()[1:]
    # 8 ms a token against 1 + 0.9 + 0.9 * 0.5 tokens of 4 ms.
    gains = [f"{2 * (1 + rate * 1.5):.2f}x" for rate in (0.96, 0.94, 0.9, 0.85)]
    assert [line.split()[2:] for line in lines] == [
        ["8.00", "stock", "8.00", "1.00x", "7.25"],
        ["8.00", "fa3", "9.00", "0.89x"],
        ["8.00", "drafts", "1+1", "4.00", "4.00x", *gains, "3.50"],
    ]
