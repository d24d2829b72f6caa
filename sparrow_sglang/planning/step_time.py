"""Measured decode steps as bytes over bandwidth plus a constant.

In: rows of `sparrow bench step`. Out: a least-squares fit with its residuals. Imports neither torch
nor SGLang.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.cost_model import StepCosts


@dataclass(frozen=True)
class MeasuredStep:
    """One decode step: what it had to read and how long it took."""

    label: str
    sparse: bool
    bytes: float
    step_ms: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "MeasuredStep":
        """Raises `InputError` on a missing or impossible value."""
        for key in ("bytes", "step_ms"):
            value = row.get(key)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < 1e18
            ):
                raise InputError(
                    f"{key}={value!r} in a measured step: expected a number above 0, as"
                    " `sparrow bench step` writes it"
                )
        label = " ".join(str(row[key]) for key in ("backend", "case") if key in row)
        return cls(label, row.get("schedule") is not None, row["bytes"], row["step_ms"])


@dataclass(frozen=True)
class StepTimeFit:
    """step_ms = bytes / bytes_per_s + constant_ms; residuals (measured - fitted) in input order."""

    bytes_per_s: float
    constant_ms: float
    residuals_ms: tuple[float, ...]

    def step_ms(self, size: float) -> float:
        """Milliseconds of a step that reads `size` bytes."""
        return size / self.bytes_per_s * 1e3 + self.constant_ms

    def rollout_ms(self, costs: StepCosts, tokens: float, batch: float) -> float:
        """Milliseconds for `tokens` decoded tokens whose `costs` are summed, in full batches."""
        return float(costs.bytes) / self.bytes_per_s * 1e3 + self.constant_ms * tokens / batch


def fit_step_time(steps: Sequence[MeasuredStep]) -> StepTimeFit:
    """Least squares over all `steps`.

    Raises `InputError` if they hold fewer than two different sizes, or if larger steps are not
    slower.
    """
    sizes = np.array([step.bytes for step in steps])
    times = np.array([step.step_ms for step in steps])
    if np.unique(sizes).size < 2:
        raise InputError(
            f"{len(steps)} measured steps hold {np.unique(sizes).size} different sizes: expected at"
            " least two (another length or batch), or bandwidth and constant cannot be told apart"
        )
    # The sizes are centred: bytes near 1e10 beside a column of ones would cost half of the digits.
    centre = sizes.mean()
    slope = float((sizes - centre) @ times / ((sizes - centre) ** 2).sum())
    if slope <= 0:
        raise InputError(
            "the measured steps do not get slower with their bytes: expected step_ms to grow;"
            " measure longer sequences or larger batches, where reading dominates"
        )
    constant = float(times.mean() - slope * centre)
    residuals = times - (slope * sizes + constant)
    return StepTimeFit(1e3 / slope, constant, tuple(residuals.tolist()))
