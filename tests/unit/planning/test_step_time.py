"""Measured steps: the fit against known formulas and NumPy, their bytes against the step model."""

import math
from typing import Any

import numpy as np
import pytest
from shapes import GROUPED, qwen

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.cost_model import rollout_costs, step_costs
from sparrow_sglang.planning.step_time import MeasuredStep, StepTimeFit, fit_step_time


def test_recovers_bandwidth_and_constant() -> None:
    sizes = [5e9, 9e9, 20e9, 61e9]
    steps = [MeasuredStep("", False, size, size / 4.3e12 * 1e3 + 1.3) for size in sizes]
    fit = fit_step_time(steps)
    assert fit.bytes_per_s == pytest.approx(4.3e12)
    assert fit.constant_ms == pytest.approx(1.3)
    assert fit.residuals_ms == pytest.approx([0.0] * 4, abs=1e-9)


def test_is_the_least_squares_solution() -> None:
    random = np.random.default_rng(0)
    sizes = random.uniform(3e9, 60e9, size=12)
    times = sizes / 4e12 * 1e3 + 1 + random.normal(size=12) * 0.3
    fit = fit_step_time([MeasuredStep("", True, *pair) for pair in zip(sizes, times, strict=True)])
    design = np.stack([sizes / 1e9, np.ones(12)], axis=1)
    (slope, constant), *_ = np.linalg.lstsq(design, times, rcond=None)
    assert fit.bytes_per_s == pytest.approx(1e12 / slope)
    assert fit.constant_ms == pytest.approx(constant)
    assert fit.residuals_ms == pytest.approx(times - design @ [slope, constant])


def test_stock_dense_steps_on_an_h200() -> None:
    """Qwen3-1.7B, batch 16, FlashInfer: bytes at 4.3 TB/s plus 1.3 to 1.4 ms."""
    rows = [(2048, 3.13), (8192, 5.65), (16384, 9.06), (32768, 16.2)]
    steps = [
        MeasuredStep.from_row(
            {
                "bytes": 16 * float(step_costs(qwen("1.7b"), [length], 16).bytes[0]),
                "step_ms": ms,
            }
        )
        for length, ms in rows
    ]
    fit = fit_step_time(steps)
    assert fit.bytes_per_s == pytest.approx(4.3e12, rel=0.01)
    assert fit.constant_ms == pytest.approx(1.35, abs=0.1)
    assert max(map(abs, fit.residuals_ms)) < 0.15


def test_rollout_time_adds_the_constant_once_per_step_of_the_batch() -> None:
    costs = rollout_costs(GROUPED, 10, [4, 6], batch=2)
    fit = StepTimeFit(bytes_per_s=1e6, constant_ms=3.0, residuals_ms=())
    expected = float(costs.bytes) / 1e6 * 1e3 + 3.0 * 10 / 2
    assert fit.rollout_ms(costs, tokens=10, batch=2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"bytes": 5e9}, "step_ms=None"),
        ({"bytes": -1, "step_ms": 3}, "bytes=-1"),
        ({"step_ms": 3}, "bytes=None"),
        ({"bytes": math.nan, "step_ms": 3}, "bytes=nan"),
    ],
)
def test_refuses_rows_that_lack_something(row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MeasuredStep.from_row(row)


def test_refuses_what_cannot_be_fitted() -> None:
    same = [MeasuredStep("", False, 5e9, 3.0), MeasuredStep("", False, 5e9, 3.1)]
    with pytest.raises(InputError, match="2 measured steps hold 1 different sizes"):
        fit_step_time(same)
    with pytest.raises(InputError, match="0 measured steps"):
        fit_step_time([])
    falling = [MeasuredStep("", False, 5e9, 3.0), MeasuredStep("", False, 9e9, 2.0)]
    with pytest.raises(InputError, match="do not get slower"):
        fit_step_time(falling)
