"""Fits the constants of predicted step times to rows of `sparrow bench step`.

    .venv/bin/python tools/fit_step_times.py [FILE ...]

FILEs are below benchmarks/results; by default those of the last fit. Writes
sparrow_sglang/planning/step_times.json.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.benchmarks.step import model_config, model_shape
from sparrow_sglang.planning.step_time import CONSTANTS, constants, step_terms
from sparrow_sglang.schedules.names import load_schedule

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def rows_of(files: Sequence[str]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Rows of one GPU and 16-bit weights, and the terms of each. Rows under a file that is not
    in benchmarks/schedules are left out: their selection rule was removed."""
    for file in files:
        content = json.loads((RESULTS / file).read_text("utf-8"))
        for row in content["rows"]:
            if (row.get("tp") or 1) > 1 or row.get("quantization"):
                continue
            shape = model_shape(row["model"], row.get("kv_cache_dtype") or "auto")
            schedule = None
            if spec := row["schedule"]:
                if spec.endswith(".json"):
                    spec = str(ROOT / "benchmarks" / "schedules" / Path(spec).name)
                    if not Path(spec).exists():
                        continue
                schedule = load_schedule(spec, 16).for_model(model_config(row["model"]))
            size = row["batch"], row["cached_tokens"] // row["batch"]
            yield row, step_terms(shape, Path(file).parent.name, *size, schedule)


def main(files: Sequence[str]) -> None:
    from scipy.optimize import nnls

    files = sorted(files or constants()["fitted_to"])
    rows = list(rows_of(files))
    measured = np.array([row["step_ms"] for row, _ in rows])
    terms = np.array([list(terms.values()) for _, terms in rows])
    # The sum of squared relative errors is least.
    factors, _ = nnls(terms / measured[:, None], np.ones(len(rows)))
    errors = terms @ factors / measured - 1
    for (row, _), error in sorted(zip(rows, errors, strict=True), key=lambda each: -abs(each[1])):
        print(f"{error:+7.1%}  {row['model']} {row['backend']} {row['schedule']} {row['case']}")
    ms = {name: float(f"{f:.4g}") for name, f in zip(rows[0][1], factors, strict=True)}
    print(ms)
    CONSTANTS.write_text(json.dumps({"fitted_to": list(files), "ms": ms}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
