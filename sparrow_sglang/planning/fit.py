"""`python -m sparrow_sglang.planning.fit benchmarks/results` computes step_times.json, the factors
of `step_time`, from the steps and rounds in results of `sparrow bench step`."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import read_object
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import CONSTANTS, GPUS, TERMS, round_terms, step_terms
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import PAGE_SIZE

# Fields of a row with the values under which steps are predicted.
_PREDICTED = {"tp": 1, "kv_cache_dtype": "auto", "quantization": None}


class Measured(NamedTuple):
    """A measured step or round: where it stands, its GPU, its terms [TERMS], milliseconds."""

    name: str
    gpu: str
    terms: np.ndarray
    ms: float


def measured_steps(results: Path) -> list[Measured]:
    """Steps and rounds of all result files in a folder beside those of models and schedules, but
    for models, schedules and arguments that cannot be predicted. Of dense steps, those of the
    backend and page size that is fastest in its file."""
    steps = []
    for path in sorted(results.rglob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        gpu = next((name for name in GPUS if name in content.get("device", "").lower()), None)
        rows = content.get("rows", ()) if gpu else ()
        timed = [row for row in rows if "step_ms" in row and "case" in row]
        steps += [*_of_file(f"{gpu}/{path.name}", str(gpu), timed, results.parent)]
    return steps


def _of_file(
    file: str, gpu: str, rows: Sequence[Mapping[str, Any]], benchmarks: Path
) -> Iterator[Measured]:
    fastest: dict[tuple[str, str], Measured] = {}
    for row in rows:
        if any(row.get(key) not in (None, value) for key, value in _PREDICTED.items()):
            continue
        try:
            terms = _terms(row, gpu, benchmarks)
        except InputError:
            continue
        case = row["model"], row["case"]
        name = " ".join(map(str, (file, *case, row["schedule"] or "dense")))
        step = Measured(name, gpu, terms, row.get("round_ms", row["step_ms"]))
        if row["schedule"]:
            yield step
        elif case not in fastest or step.ms < fastest[case].ms:
            fastest[case] = step
    yield from fastest.values()


def _terms(row: Mapping[str, Any], gpu: str, benchmarks: Path) -> np.ndarray:
    config = read_object(benchmarks / "models" / row["model"] / "config.json", "a model's config")
    shape, sheet = ModelShape.from_config(config), GPUS[gpu]
    batch, cached = map(int, row["case"].split("x"))
    if not (spec := row["schedule"]):
        return step_terms(shape, sheet, batch, cached)
    path = benchmarks / "schedules" / spec
    schedule = load_schedule(str(path) if path.is_file() else spec, PAGE_SIZE)
    if "round_ms" in row:
        fp8 = sheet.fp8 and row.get("draft_weights") in ("auto", "fp8")
        drafts = row["drafts"]
        rows = 1 + drafts + row.get("lookups", 0)
        return round_terms(shape, sheet, batch, cached, drafts, rows, schedule, fp8)
    schedule = schedule.dense_below(row.get("dense_tokens") or 0)
    return step_terms(shape, sheet, batch, cached, schedule)


def fit(steps: Sequence[Measured]) -> dict[str, Any]:
    """The content of step_times.json: a non-negative fit of least squared relative errors."""
    relative = np.array([step.terms / step.ms for step in steps])
    factors = [float(f"{factor:.4g}") for factor in nnls(relative, np.ones(len(steps)))[0]]
    return {
        "measured_on": sorted({step.gpu for step in steps}),
        "steps": len(steps),
        "mean_error": round(float(np.abs(relative @ factors - 1).mean()), 3),
        "ms": dict(zip(TERMS, factors, strict=True)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder of results of `sparrow bench step`")
    if not (measured := measured_steps(folder := parser.parse_args().results)):
        parser.error(f"{folder}: expected a folder with results of `sparrow bench step`")
    write_json(Path(__file__).with_name(CONSTANTS), fit(measured))
