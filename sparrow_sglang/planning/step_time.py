"""Measured decode steps as bytes over bandwidth plus a constant.

In: rows of measured steps (`sparrow bench` writes them). Out: a least-squares fit with its
residuals. Imports neither torch nor SGLang.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.cost_model import StepCosts
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedule import PAGE_SIZE

# The dense layers of schedules that do not set them.
_DENSE_LAYERS = {0, 1}


@dataclass(frozen=True)
class MeasuredStep:
    """One decode step: what it had to read and how long it took."""

    label: str
    sparse: bool
    bytes: float
    step_ms: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any], shape: ModelShape) -> "MeasuredStep":
        """From a row with `step_ms` and either `bytes` or `batch` and `cached_tokens`.

        `cached_tokens` and, for a sparse step, `budget_tokens` are sums over the batch. Without
        `bytes`, layers 0 and 1 are dense and pages are of 16 unless the row has `dense_layers` (a
        number) and `page_size`; for sliding windows, all sequences count as equally long. Raises
        `InputError` on a missing or impossible value.
        """
        budget = row.get("budget_tokens")
        sparse = budget is not None or row.get("schedule") is not None
        if "bytes" in row:
            size = _positive(row, "bytes")
        elif sparse and budget is None:
            raise InputError(
                "a sparse row has neither bytes nor budget_tokens: expected one of them, the bytes"
                " that the step reads or the tokens read per sparse layer, summed over the batch"
            )
        else:
            size = _bytes_of_row(row, shape)
        label = " ".join(str(row[key]) for key in ("backend", "case") if key in row)
        fallback = f"batch {row.get('batch', '?')}, {row.get('cached_tokens', '?')} cached"
        return cls(label or fallback, sparse, size, _positive(row, "step_ms"))


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


def _bytes_of_row(row: Mapping[str, Any], shape: ModelShape) -> float:
    batch, cached = _positive(row, "batch"), _positive(row, "cached_tokens")
    weights = 2.0 * shape.weights_read(batch)
    per_layer = shape.kv_itemsize * shape.layer_kv_width
    whole = shape.whole_layers
    if shape.linear:
        weights += batch * shape.linear.moved_bytes
    weights += per_layer * len(shape.window_layers) * min(cached, batch * shape.window_tokens)
    if row.get("budget_tokens") is None:
        return weights + whole * per_layer * cached
    budget = min(_positive(row, "budget_tokens"), cached)
    dense_layers = int(row.get("dense_layers", len(_DENSE_LAYERS - set(shape.partial_layers))))
    sparse_layers = whole - dense_layers
    # Steps that read everything score no pages; the three pages that each sequence always keeps are
    # never scored.
    pages = cached / row.get("page_size", PAGE_SIZE) - 3 * batch if budget < cached else 0.0
    kv = per_layer * (dense_layers * cached + sparse_layers * budget)
    # A landmark is a mean key in 16 bits, whatever the KV cache holds.
    return weights + kv + shape.layer_kv_width * sparse_layers * max(0.0, pages)


def _positive(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise InputError(
            f"{key}={value!r} in a measured step: expected a number above 0; rows need step_ms and"
            " either bytes, or batch and cached_tokens (with budget_tokens if sparse)"
        )
    return float(value)
