"""Speed-ups of a decode step by model and context, from the committed results of `bench step`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.benchmarks.result_files import Run
from sparrow_sglang.benchmarks.steps.decode_step import batch_lengths

TARGET = 0.86
# Sequences a step; of the batches measured, the one with most models and contexts.
BATCH = 16
BACKENDS = {"flashinfer": "FlashInfer", "fa3": "FlashAttention-3", "triton": "Triton"}


@dataclass(frozen=True)
class Point:
    """A case of one model: cached tokens a sequence, milliseconds a step, and the dense backend.

    `same_run` says whether both sides were measured in one run.
    """

    model: str
    context: int
    sparse_ms: float
    dense_ms: float
    backend: str
    same_run: bool

    @property
    def speedup(self) -> float:
        return self.dense_ms / self.sparse_ms


def speedup_points(runs: Sequence[Run], target: float = TARGET, batch: int = BATCH) -> list[Point]:
    """Steps of `batch` equally long sequences under each model's own schedule for `target`.

    `runs` are of one device. The dense side is the fastest backend that they hold for the case. A
    backend's time is that of the sparse row's own run where it is there, as a device differs from
    run to run. Of several sparse rows of a case, the one with the smallest speed-up counts.
    """
    points: dict[tuple[str, int], Point] = {}
    for run in runs:
        for row in run.rows:
            if row["backend"] != "sparrow" or row["schedule"] != f"{row['model']}-{target}":
                continue
            lengths = batch_lengths(row["case"])
            dense = _fastest_dense(row, run, runs)
            if len(lengths) != batch or len(set(lengths)) != 1 or dense is None:
                continue
            point = Point(row["model"], lengths[0], row["step_ms"], *dense)
            known = points.get((point.model, point.context))
            if known is None or point.speedup < known.speedup:
                points[point.model, point.context] = point
    return sorted(points.values(), key=lambda point: (_size(point.model), point.context))


def fullest_device(runs: Sequence[Run]) -> tuple[str, list[Point]]:
    """The device with most `speedup_points`, and these; an empty list if no device has any."""
    by_device = {
        device: speedup_points([run for run in runs if run.device == device])
        for device in sorted({run.device for run in runs})
    }
    device = max(by_device, key=lambda name: len(by_device[name]), default="")
    return device, by_device.get(device, [])


def _fastest_dense(
    row: Mapping[str, Any], own: Run, runs: Iterable[Run]
) -> tuple[float, str, bool] | None:
    """The dense fields of a `Point`: the fastest backend that was measured for the row's case."""
    times: dict[str, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for other in run.rows:
            same = (other["model"], other["case"]) == (row["model"], row["case"])
            if same and other["backend"] != "sparrow":
                times[other["backend"]][run is own].append(other["step_ms"])
    best = [(min(of[True] or of[False]), name, bool(of[True])) for name, of in times.items()]
    return min(best, default=None)


def _size(model: str) -> float:
    found = re.search(r"(\d+(?:\.\d+)?)b$", model)
    return float(found[1]) if found else 0.0


def against(points: Iterable[Point]) -> str:
    """The dense side by name, e.g. "SGLang's FlashInfer"."""
    names = sorted({BACKENDS.get(point.backend, point.backend) for point in points})
    return f"SGLang's {' or '.join(names)}"
