"""The tables of `sparrow plan`, as text.

In: a `Plan`. Out: where the time of a decode step goes, and the expected speed-up by length.
Imports neither torch nor SGLang.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparrow_sglang.planning.cost_model import (
    Hardware,
    paper_costs,
    rollout_costs,
    step_costs,
    tokens_read_by_length,
)
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedule import BudgetSchedule

DEFAULT_LENGTHS = (2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Plan:
    """Everything that the tables are computed from.

    `lengths` are generated tokens. `hardware` has no name and a peak of 0
    where only its intensity is known: then the tables count FLOPs instead of milliseconds.
    `calibration` says whether the schedule was calibrated for the model.
    """

    model: str
    shape: ModelShape
    schedule: BudgetSchedule
    calibration: str
    hardware: Hardware
    lengths: tuple[int, ...]
    prompt_tokens: int
    samples: int
    batch: int


def render(plan: Plan) -> str:
    """The plan's tables as text."""
    return "\n\n".join([_headline(plan), _header(plan), _step_table(plan), _rollout_table(plan)])


def _headline(plan: Plan) -> str:
    """One figure, and what it means: the step model at the longest length."""
    lengths = plan.lengths[-1:]
    what = f"generations of {lengths[0]:,} tokens"
    device = plan.hardware.name or f"a device of {plan.hardware.intensity:.0f} FLOPs per byte"
    return (
        f"{plan.model} decodes {_speedups(plan, lengths)[1]} as fast as dense under"
        f" {plan.schedule.name}:\n{what}, {plan.batch} at a time on {device}, if every part of a"
        " step ran at the device's peak rate"
    )


def _header(plan: Plan) -> str:
    shape, schedule, hardware = plan.shape, plan.schedule, plan.hardware
    state = plan.calibration if schedule.calibrated else "not calibrated"
    other = ""
    if shape.window_layers:
        other = f" ({len(shape.window_layers)} with a window of {shape.window_tokens:,} tokens)"
    if shape.linear:
        other = f" ({len(shape.linear.layers)} with linear attention)"
    # Neither the rows of an input embedding nor norms, so fewer than the model's name says.
    weights = f"{shape.parameters / 1e9:.2f} billion weights read by a step"
    if shape.experts:
        weights += (
            f" of one token, of {shape.weights_read(math.inf) / 1e9:.2f} billion"
            f" ({shape.experts.per_token} of {shape.experts.number} experts)"
        )
    device = f"{hardware.intensity:.0f} FLOPs in the time of reading a byte"
    if hardware.name:
        device = (
            f"{hardware.name}: {hardware.flops_per_s / 1e12:.0f} TFLOP/s in bf16,"
            f" {hardware.bytes_per_s / 1e12:.2f} TB/s, {device}"
        )
    return (
        f"model: {shape.num_layers} layers{other}, {shape.num_q_heads} query and"
        f" {shape.num_kv_heads} KV heads of {shape.head_dim}, {weights},"
        f" {shape.kv_width:,} KV values of {8 * shape.kv_itemsize} bits per token\n"
        f"schedule {schedule.name} ({state}): {schedule.budget_tokens[0]:,} to"
        f" {schedule.budget_tokens[-1]:,} tokens, pages of {schedule.page_size}\n"
        f"{device}; batch {plan.batch}, prompt {plan.prompt_tokens:,} tokens"
    )


def _step_table(plan: Plan) -> str:
    timed, intensity = bool(plan.hardware.name), plan.hardware.intensity
    unit = "ms" if timed else f"TFLOP (a byte read counts as {intensity:.0f} FLOPs)"
    scale = plan.batch * (1e3 / plan.hardware.flops_per_s if timed else 1e-12)
    rows = []
    for length in plan.lengths:
        cached = plan.prompt_tokens + length
        dense, sparse = (
            step_costs(plan.shape, [cached], plan.batch, schedule)
            for schedule in (None, plan.schedule)
        )
        for name, costs in (("dense", dense), ("sparse", sparse)):
            read = [costs.weight_bytes, costs.kv_bytes, costs.scoring_bytes]
            if plan.shape.linear:
                read.append(costs.state_bytes)
            total = costs.eflops(intensity)
            parts = [*(intensity * part for part in read), costs.flops, total]
            cells = [f"{float(part[0]) * scale:.2f}" for part in parts]
            gain = f"{float((dense.eflops(intensity) / total)[0]):.2f}x"
            rows.append([f"{cached:,}" if name == "dense" else "", name, *cells, gain])
    states = ["states"] if plan.shape.linear else []
    heads = ["cached", "decode", "weights", "KV", "scoring", *states, "compute", "total"]
    heads.append("speed-up")
    return f"Where a decode step goes, {unit} at peak rates\n" + _table(heads, rows)


def _rollout_table(plan: Plan) -> str:
    rows = [
        [f"{length:,}", *_budget_cells(plan, length), *_speedups(plan, [length])]
        for length in plan.lengths
    ]
    title = "Expected rollout speed-up"
    heads = ["generated", "budget", "KV read", "paper's formula", "step model"]
    dense = [i for i in plan.schedule.dense_layers if i not in plan.shape.partial_layers]
    return (
        f"{title}\n{_table(heads, rows)}\n"
        f"paper's formula: {plan.samples} samples share a prompt's KV, weights are free (large"
        f" batch)\nstep model: weights read once per step of {plan.batch}, layers {dense} dense,"
        f" {plan.schedule.selection}"
    )


def _budget_cells(plan: Plan, length: int) -> list[str]:
    """KV budget at the end of a generation, and the share of cached tokens read on the way."""
    cached = plan.prompt_tokens + length
    held = plan.prompt_tokens * length + length * (length + 1) / 2
    read = tokens_read_by_length(plan.schedule, plan.prompt_tokens, [length])[0]
    return [f"{plan.schedule.kv_budget_tokens(cached):,}", f"{read / held:.0%}"]


def _speedups(plan: Plan, lengths: Sequence[int]) -> list[str]:
    """Total dense over total sparse cost of generations: the paper's formula, the step model."""
    intensity, shape, prompt = plan.hardware.intensity, plan.shape, plan.prompt_tokens
    paper = [
        paper_costs(shape, prompt, lengths, plan.samples, schedule).eflops(intensity)
        for schedule in (None, plan.schedule)
    ]
    steps = [
        float(rollout_costs(shape, prompt, lengths, plan.batch, schedule).eflops(intensity))
        for schedule in (None, plan.schedule)
    ]
    return [f"{dense / sparse:.2f}x" for dense, sparse in (paper, steps)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = ("  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in (heads, *rows))
    return "\n".join(lines)
