"""Sparse decode steps, each with the dense step that it is compared with.

In: results of `sparrow bench step`. Out: `Pair`s.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.report.result_files import Run

SPARSE = "sparrow"
_BACKENDS = {"flashinfer": "FlashInfer", "fa3": "FlashAttention-3", "triton": "Triton"}


@dataclass(frozen=True)
class Pair:
    """A sparse row, the dense row it is compared with (None: not measured), and their runs."""

    sparse: dict[str, Any]
    run: Run
    dense: dict[str, Any] | None
    dense_run: Run | None

    @property
    def speedup(self) -> float | None:
        return self.dense["step_ms"] / self.sparse["step_ms"] if self.dense else None

    @property
    def model(self) -> str:
        return served_model(self.sparse)

    @property
    def shape(self) -> tuple[int, int] | None:
        """Sequences, and cached tokens of each; None if they differ in length."""
        match = re.fullmatch(r"(\d+)x(\d+)", self.sparse["case"])
        return (int(match[1]), int(match[2])) if match else None


def served_model(row: Mapping[str, Any]) -> str:
    """A row's model and how it was served, if not by default: "qwen3-8b (TP 2, FP8 KV)"."""
    ways = [f"{name.upper()} {row[name]}" for name in ("tp", "ep") if row.get(name, 1) > 1]
    ways += ["FP8 KV"] if has_fp8_kv(row) else []
    return f"{row['model']} ({', '.join(ways)})" if ways else str(row["model"])


def has_fp8_kv(row: Mapping[str, Any]) -> bool:
    return str(row.get("kv_cache_dtype", "auto")).startswith("fp8")


def pair_rows(runs: Sequence[Run]) -> list[Pair]:
    """Each sparse row with the fastest dense backend of its SGLang for its model, case and device.

    A backend's time comes from the sparse row's own run if it was timed there, as a device's speed
    differs from run to run; else it is the shortest of other runs. Pairs are in the order of the
    runs and rows.
    """
    return [
        Pair(row, run, *_fastest_dense(row, run, runs))
        for run in runs
        for row in run.rows
        if row["backend"] == SPARSE
    ]


def _fastest_dense(
    sparse: dict[str, Any], own: Run, runs: Sequence[Run]
) -> tuple[dict[str, Any], Run] | tuple[None, None]:
    by_backend: dict[str, list[tuple[bool, float, dict[str, Any], Run]]] = defaultdict(list)
    for run in runs:
        comparable = (run.device, run.sglang) == (own.device, own.sglang)
        for row in run.rows if comparable else ():
            same_model = served_model(row) == served_model(sparse)
            if same_model and row["case"] == sparse["case"] and row["backend"] != SPARSE:
                elsewhere = run is not own
                by_backend[row["backend"]].append((elsewhere, row["step_ms"], row, run))
    best = [min(rows, key=lambda entry: entry[:2]) for rows in by_backend.values()]
    fastest = min(best, key=lambda entry: entry[1], default=None)
    return fastest[2:] if fastest else (None, None)


def model_size(model: str) -> float:
    """Billions of parameters in a name such as qwen3-1.7b or qwen3-30b-a3b; 0 without any."""
    match = re.search(r"\b(\d+(?:\.\d+)?)b\b", model)
    return float(match[1]) if match else 0.0


def reading_order(pair: Pair) -> tuple[Any, ...]:
    """Sort key of pairs: device, model by size, schedule, batch and context."""
    row = pair.sparse
    # A model's own schedules come before fixed ones.
    fixed = row["schedule"].startswith("fixed-")
    budget = int(row["schedule"].rpartition("-")[2]) if fixed else 0
    context = row["cached_tokens"] / row["batch"]
    size = model_size(row["model"])
    split = (size, row.get("tp", 1), row.get("ep", 1), has_fp8_kv(row))
    return (pair.run.device, *split, fixed, budget, row["schedule"], row["batch"], context)


def dense_backends(pairs: Sequence[Pair]) -> str:
    """The dense side by name, e.g. "SGLang's FlashInfer"."""
    backends = {pair.dense["backend"] for pair in pairs if pair.dense}
    return f"SGLang's {' or '.join(sorted(_BACKENDS.get(name, name) for name in backends))}"
