"""The tables of `sparrow plan`, as text.

In: a `Plan`. Out: where the time of a decode step goes, the expected speed-up by length, and
measured steps beside their fit. Imports neither torch nor SGLang.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparrow_sglang.planning.cost_model import (
    Hardware,
    StepCosts,
    Workload,
    mean_tokens_read,
    paper_dense,
    paper_scoring,
    paper_sparse,
    rollout_costs,
    step_costs,
)
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import MeasuredStep, StepTimeFit, fit_step_time
from sparrow_sglang.schedule import BudgetSchedule

DEFAULT_LENGTHS = (2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Plan:
    """Everything that the tables are computed from.

    `lengths` are generated tokens; `expected` says whether they are a sample of real generations,
    to be averaged over, rather than lengths of interest. `hardware` has no name and a peak of 0
    where only its intensity is known: then the tables count FLOPs instead of milliseconds.
    `calibration` says whether the schedule was calibrated for the model.
    """

    model: str
    shape: ModelShape
    schedule: BudgetSchedule
    calibration: str
    hardware: Hardware
    lengths: tuple[int, ...]
    expected: bool
    prompt_tokens: int
    samples: int
    batch: int
    measured: tuple[MeasuredStep, ...]

    @property
    def shown(self) -> list[int]:
        """Lengths with a row of their own."""
        if not self.expected:
            return list(self.lengths)
        longest = max(self.lengths)
        return [length for length in DEFAULT_LENGTHS if length < longest] + [longest]


def render(plan: Plan) -> str:
    """The plan's tables as text."""
    fits = _fit(plan.measured)
    parts = [
        _headline(plan),
        _header(plan),
        _step_table(plan),
        _rollout_table(plan, fits),
    ]
    if fits is not None:
        parts.append(_measured_table(plan, fits))
    return "\n\n".join(parts)


def _headline(plan: Plan) -> str:
    """One figure, and what it means: the step model over all lengths, or at the longest."""
    lengths = plan.lengths if plan.expected else plan.lengths[-1:]
    what = (
        f"{len(lengths):,} generations of {np.mean(lengths):,.0f} tokens on average"
        if plan.expected
        else f"generations of {lengths[0]:,} tokens"
    )
    device = plan.hardware.name or f"a device of {plan.hardware.intensity:.0f} FLOPs per byte"
    gain = _step_model_speedup(plan, lengths)
    return (
        f"{plan.model} decodes {gain:.2f}x as fast as dense under {plan.schedule.name}:\n"
        f"{what}, {plan.batch} at a time on {device}, if every part of a step ran at the device's"
        " peak rate"
    )


def _header(plan: Plan) -> str:
    shape, schedule, hardware = plan.shape, plan.schedule, plan.hardware
    state = plan.calibration if schedule.calibrated else "not calibrated"
    other = ""
    if shape.window_layers:
        other = f" ({len(shape.window_layers)} with a window of {shape.window_tokens:,} tokens)"
    if shape.linear:
        other = f" ({len(shape.linear.layers)} with linear attention)"
    device = f"{hardware.intensity:.0f} FLOPs in the time of reading a byte"
    if hardware.name:
        device = (
            f"{hardware.name}: {hardware.flops_per_s / 1e12:.0f} TFLOP/s in bf16,"
            f" {hardware.bytes_per_s / 1e12:.2f} TB/s, {device}"
        )
    return (
        f"model: {shape.num_layers} layers{other}, {shape.num_q_heads} query and"
        f" {shape.num_kv_heads} KV heads of {shape.head_dim}, {_parameters(shape)},"
        f" {shape.kv_width:,} KV values of {8 * shape.kv_itemsize} bits per token\n"
        f"schedule {schedule.name} ({state}): {schedule.budget_tokens[0]:,} to"
        f" {schedule.budget_tokens[-1]:,} tokens, pages of {schedule.page_size}\n"
        f"{device}; batch {plan.batch}, prompt {plan.prompt_tokens:,} tokens"
    )


def _parameters(shape: ModelShape) -> str:
    # Neither the rows of an input embedding nor norms, so fewer than the model's name says.
    words = f"{shape.parameters / 1e9:.2f} billion weights read by a step"
    if shape.experts is None:
        return words
    return (
        f"{words} of one token, of {shape.weights_read(math.inf) / 1e9:.2f} billion"
        f" ({shape.experts.per_token} of {shape.experts.number} experts)"
    )


def _step_table(plan: Plan) -> str:
    timed = bool(plan.hardware.name)
    intensity = plan.hardware.intensity
    unit = "ms" if timed else f"TFLOP (a byte read counts as {intensity:.0f} FLOPs)"
    scale = plan.batch * (1e3 / plan.hardware.flops_per_s if timed else 1e-12)
    rows = []
    for length in plan.shown:
        cached = plan.prompt_tokens + length
        totals = {}
        for name, schedule in (("dense", None), ("sparse", plan.schedule)):
            costs = step_costs(plan.shape, [cached], plan.batch, schedule)
            read = [costs.weight_bytes, costs.kv_bytes, costs.scoring_bytes]
            if plan.shape.linear:
                read.append(costs.state_bytes)
            parts = [*(intensity * part for part in read), costs.flops]
            totals[name] = float(costs.eflops(intensity)[0])
            cells = [f"{float(part[0]) * scale:.2f}" for part in parts]
            cells.append(f"{totals[name] * scale:.2f}")
            gain = f"{totals['dense'] / totals[name]:.2f}x"
            rows.append([f"{cached:,}" if name == "dense" else "", name, *cells, gain])
    states = ["states"] if plan.shape.linear else []
    heads = ["cached", "decode", "weights", "KV", "scoring", *states, "compute", "total"]
    heads.append("speed-up")
    return f"Where a decode step goes, {unit} at peak rates\n" + _table(heads, rows)


def _rollout_table(plan: Plan, fits: tuple[StepTimeFit, StepTimeFit] | None) -> str:
    rows = [
        [f"{length:,}", *_budget_cells(plan, length), *_speedup_cells(plan, [length], fits)]
        for length in plan.shown
    ]
    if plan.expected:
        mean = f"mean {np.mean(plan.lengths):,.0f}"
        rows.append([mean, "", "", *_speedup_cells(plan, plan.lengths, fits)])
    heads = ["generated", "budget", "KV read", "paper's formula", "step model"]
    note = (
        f"paper's formula: {plan.samples} samples share a prompt's KV, weights are free"
        f" (large batch)\nstep model: weights read once per step of {plan.batch}, layers"
        f" {[i for i in plan.schedule.dense_layers if i not in plan.shape.partial_layers]} dense,"
        f" {plan.schedule.selection}"
    )
    if fits is not None:
        heads.append("measured")
        note += "\nmeasured: bytes of the step model at the fitted bandwidth and constant"
    title = "Expected rollout speed-up"
    if plan.expected:
        title += f" over {len(plan.lengths):,} generations"
    return f"{title}\n{_table(heads, rows)}\n{note}"


def _budget_cells(plan: Plan, length: int) -> list[str]:
    """KV budget at the end of a generation, and the share of cached tokens read on the way."""
    cached = plan.prompt_tokens + length
    held = plan.prompt_tokens + (length + 1) / 2
    read = mean_tokens_read(plan.schedule, plan.prompt_tokens, length)
    return [f"{plan.schedule.kv_budget_tokens(cached):,}", f"{read / held:.0%}"]


def _speedup_cells(
    plan: Plan, lengths: Sequence[int], fits: tuple[StepTimeFit, StepTimeFit] | None
) -> list[str]:
    """Total dense over total sparse cost: formula, step model and, if measured, fitted time."""
    intensity = plan.hardware.intensity
    dense = sparse = 0.0
    values, counts = np.unique(np.asarray(lengths), return_counts=True)
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        work = Workload(plan.prompt_tokens, length, plan.samples)
        budget = mean_tokens_read(plan.schedule, plan.prompt_tokens, length)
        paper = paper_sparse(plan.shape, work, budget)
        paper += paper_scoring(plan.shape, work, plan.schedule.page_size)
        dense += count * paper_dense(plan.shape, work).eflops(intensity)
        sparse += count * paper.eflops(intensity)
    gains = [dense / sparse, _step_model_speedup(plan, lengths)]
    if fits is not None:
        costs = _step_model_costs(plan, lengths)
        times = [
            fit.rollout_ms(cost, sum(lengths), plan.batch)
            for fit, cost in zip(fits, costs, strict=True)
        ]
        gains.append(times[0] / times[1])
    return [f"{gain:.2f}x" for gain in gains]


def _step_model_costs(plan: Plan, lengths: Sequence[int]) -> list[StepCosts]:
    """Costs of generations of these lengths, dense and sparse."""
    return [
        rollout_costs(plan.shape, plan.prompt_tokens, lengths, plan.batch, schedule)
        for schedule in (None, plan.schedule)
    ]


def _step_model_speedup(plan: Plan, lengths: Sequence[int]) -> float:
    dense, sparse = (
        cost.eflops(plan.hardware.intensity) for cost in _step_model_costs(plan, lengths)
    )
    return float(dense / sparse)


def _measured_table(plan: Plan, fits: tuple[StepTimeFit, StepTimeFit]) -> str:
    dense, sparse = fits
    shared = dense is sparse
    peak = plan.hardware.bytes_per_s
    rows = []
    for step in plan.measured:
        fitted = (sparse if step.sparse else dense).step_ms(step.bytes)
        formula = f"{step.bytes / peak * 1e3:.2f}" if plan.hardware.name else "-"
        cells = [f"{step.step_ms:.2f}", f"{fitted:.2f}", f"{step.step_ms - fitted:+.2f}"]
        rows.append([step.label, f"{step.bytes / 1e9:.2f}", formula, *cells])
    named = [("all steps", dense)] if shared else [("dense", dense), ("sparse", sparse)]
    lines = [
        f"{name}: {fit.bytes_per_s / 1e12:.2f} TB/s plus {fit.constant_ms:.2f} ms a step"
        for name, fit in named
    ]
    heads = ["step", "GB", "at peak ms", "measured ms", "fitted ms", "residual ms"]
    return "Measured steps\n" + _table(heads, rows) + "\n" + "\n".join(lines)


def _fit(measured: Sequence[MeasuredStep]) -> tuple[StepTimeFit, StepTimeFit] | None:
    """Fits of the dense and the sparse steps; one for both where either has too few sizes."""
    if not measured:
        return None
    groups = [[step for step in measured if step.sparse is sparse] for sparse in (False, True)]
    if all(len({step.bytes for step in group}) > 1 for group in groups):
        return fit_step_time(groups[0]), fit_step_time(groups[1])
    joint = fit_step_time(measured)
    return joint, joint


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = ("  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in (heads, *rows))
    return "\n".join(lines)
