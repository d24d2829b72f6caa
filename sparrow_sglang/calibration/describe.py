"""The measurements and choices of a calibration, as tables and sentences.

In: tails per budget and bin, and schedules made of them. Out: text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparrow_sglang.calibration.choice import MeasuredTails, holds, shortage
from sparrow_sglang.mismatch.tail import BinTail
from sparrow_sglang.schedule import BudgetSchedule


def interval(tail: BinTail) -> dict[str, Any]:
    wanted = ("tokens", "tail", "tail_low", "tail_high", "mean")
    return {key: value for key, value in asdict(tail).items() if key in wanted}


def describe(schedule: BudgetSchedule) -> str:
    """The bins of a calibrated schedule as a table."""
    bins: Any = schedule.provenance["bins"]
    lines = [_table_head("basis")]
    for row in bins:
        span = _positions(row["bin"], schedule.bin_tokens)
        lines.append(_table_line(span, row["budget_tokens"], row, row["basis"]))
    return "\n".join(lines)


def describe_tails(tails: MeasuredTails, targets: Sequence[float]) -> str:
    """Tail, interval and tokens of each bin and budget, and the targets that the budget holds."""
    lines = [_table_head("holds")]
    for index in tails.bins:
        span = _positions(index, tails.bin_tokens)
        for budget in sorted(tails.by_budget):
            tail = tails.by_budget[budget].get(index)
            if tail is None:
                continue
            held = " ".join(f"{target:g}" for target in sorted(targets) if holds(tail, target))
            verdict = shortage(tail, tails.min_tokens) or held or "-"
            lines.append(_table_line(span, budget, interval(tail), verdict))
            span = ""
    return "\n".join(lines)


def describe_misses(tails: MeasuredTails, target: float) -> list[str]:
    """A line on each bin where no measured budget holds: which came closest, and what to try."""
    lines = []
    for index in tails.bins:
        found = tails.closest(index, target)
        if found is None:
            continue
        budget, tail = found
        end = tails.whole_budget(index)
        largest = max(b for b, bins in tails.by_budget.items() if index in bins and b < end)
        between = (largest + end) // (2 * tails.page) * tails.page
        hints = []
        if (tail.tail_high or 0) >= target:
            hints.append("more prompts or --samples")
        if between > largest:
            hints.append(f"--budgets with {between}, and a --work of its own")
        if tail.tail_low:
            hints.append(f"a --target of at most {_floor(tail.tail_low)}")
        lines.append(
            f"positions {_positions(index, tails.bin_tokens)}: no budget holds {target:g};"
            f" {_closest_words(budget, tail)}; try {', or '.join(hints) or 'longer prompts'}"
        )
    return lines


def nothing_holds(tails: MeasuredTails, target: float) -> str:
    """Why no schedule is written, and what to try."""
    missed = [(index, tails.closest(index, target)) for index in tails.bins]
    found = [(index, *each) for index, each in missed if each is not None]
    words = "the budgets hold every measured position whole"
    if found:
        index, budget, tail = max(found, key=lambda each: each[2].tail_low or 0)
        where = _positions(index, tails.bin_tokens)
        words = f"{_closest_words(budget, tail)}, at positions {where}"
    return (
        f"target {target:g}: no measured budget holds it in any bin, so there is nothing to"
        f" calibrate by and no schedule is written; {words}: expected larger --budgets, more"
        " prompts or --samples, or a lower --target"
    )


def _closest_words(budget: int, tail: BinTail) -> str:
    return (
        f"{budget} came closest, with a tail of {tail.tail:.3f}"
        f" (interval {tail.tail_low:.3f}-{tail.tail_high:.3f})"
    )


def _floor(tail: float) -> str:
    """`tail` rounded down to two decimals."""
    return f"{math.floor(tail * 100) / 100:.2f}"


def _positions(index: int, bin_tokens: int) -> str:
    return f"{index * bin_tokens}-{(index + 1) * bin_tokens - 1}"


def _table_head(last: str) -> str:
    return f"{'positions':>15} {'budget':>7} {'tail':>6}  {'95 % interval':<14} tokens  {last}"


def _table_line(span: str, budget: int, row: Mapping[str, Any], last: str) -> str:
    tail, interval = "", ""
    if "tail" in row:
        tail = f"{row['tail']:.3f}"
        if row["tail_low"] is not None:
            interval = f"{row['tail_low']:.3f}-{row['tail_high']:.3f}"
    return f"{span:>15} {budget:>7} {tail:>6}  {interval:<14} {row['tokens']:>6}  {last}"
