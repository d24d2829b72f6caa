"""Estimated speed of drafting with sparse decode and verifying densely, and of sparse decode alone.

`python -m sparrow_sglang.benchmarks.steps.speculative --out FILE`, in a checkout, computes it from
the committed step times and acceptance rates.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.benchmarks.options import MODELS
from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT, Results, load_runs
from sparrow_sglang.planning.cost_model import step_costs
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import MeasuredStep, StepTimeFit, fit_step_time
from sparrow_sglang.report.step_pairs import served_model
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import schedule_for_model

ACCEPTANCE = RESULTS / "h200/calibration_check_smollm2-135m.json"
TAIL_TARGET = 0.86
MOST_DRAFTS = 32


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Expected tokens from one verification of `drafts` drafted ones, the verifier's own included.

    (1 - a^(n + 1)) / (1 - a), as in eq. 1 of Leviathan et al. 2023 (arXiv:2211.17192), where each
    draft is accepted with probability a, independently of the others.
    """
    return sum(acceptance**accepted for accepted in range(drafts + 1))


def mean_acceptance() -> float:
    """Mean acceptance rate of a model under its calibrated schedule, in bins decoded sparsely.

    Leviathan et al. call it alpha: E[sum of min(p, q)] over the vocabulary.
    """
    checks = json.loads((ROOT / ACCEPTANCE).read_text())["checks"]
    [check] = [check for check in checks if check["target"] == TAIL_TARGET]
    sparse = [row for row in check["bins"] if row["budget_tokens"] < row["first_position"]]
    return float(np.average([r["mean"] for r in sparse], weights=[r["tokens"] for r in sparse]))


def estimate(
    fit: StepTimeFit,
    shape: ModelShape,
    schedule: BudgetSchedule,
    case: tuple[int, int],
    acceptance: float,
) -> dict[str, Any]:
    """Speed-up over dense decode, in tokens/s, of sparse decode and of the best draft length.

    A verification is assumed to cost a dense step: it reads the same weights and KV, and the
    arithmetic of a few more tokens is free at these batch sizes. `case` is the batch size and the
    cached tokens of a sequence.
    """
    batch, length = case
    dense, sparse = (
        fit.step_ms(batch * float(step_costs(shape, [length], batch, by).bytes[0]))
        for by in (None, schedule)
    )
    gains = [
        expected_tokens(acceptance, drafts) * dense / (drafts * sparse + dense)
        for drafts in range(MOST_DRAFTS + 1)
    ]
    return {
        "batch": batch,
        "cached_tokens_each": length,
        "dense_ms": dense,
        "sparse_ms": sparse,
        "sparse_gain": dense / sparse,
        "speculative_gain": max(gains),
        "drafts": int(np.argmax(gains)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    acceptance = mean_acceptance()
    results = Results(parser.parse_args(argv).out, acceptance=acceptance)
    # One fit needs times of one device: the fitted bandwidth is the device's.
    device = json.loads((ROOT / ACCEPTANCE).read_text())["device"]
    runs = [run for run in load_runs(ROOT, "step_ms") if run.content["device"] == device]
    rows = [row for run in runs for row in run.rows]
    for model in ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b"):
        config = json.loads((MODELS / model / "config.json").read_text())
        shape = ModelShape.from_config(config)
        measured = [row for row in rows if served_model(row) == model]
        fit = fit_step_time([MeasuredStep.from_row(row, shape) for row in measured])
        schedule = schedule_for_model(config, PAGE_SIZE)
        for case in ((batch, length) for batch in (1, 4) for length in (16384, 32768)):
            results.add({"model": model} | estimate(fit, shape, schedule, case, acceptance))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
