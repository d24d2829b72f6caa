"""The measurements and choices of a calibration, as tables and sentences.

In: tails per budget and bin, and schedules made of them. Out: text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparrow_sglang.calibration.choice import (
    closest,
    holds,
    shortage,
    whole_budget,
)
from sparrow_sglang.mismatch.tail import BinTail
from sparrow_sglang.schedule import BudgetSchedule

Tails = Mapping[int, Mapping[int, BinTail]]
"""KV budget in tokens -> bin of positions -> tail."""


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


def describe_tails(tails: Tails, targets: Sequence[float], bin_tokens: int, min_tokens: int) -> str:
    """Tail, interval and tokens of each bin and budget, and the targets that the budget holds."""
    lines = [_table_head("holds")]
    for index in sorted({index for bins in tails.values() for index in bins}):
        span = _positions(index, bin_tokens)
        for budget in sorted(tails):
            tail = tails[budget].get(index)
            if tail is None:
                continue
            held = " ".join(f"{target:g}" for target in sorted(targets) if holds(tail, target))
            verdict = shortage(tail, min_tokens) or held or "-"
            lines.append(_table_line(span, budget, interval(tail), verdict))
            span = ""
    return "\n".join(lines)


def describe_misses(
    tails: Tails, target: float, bin_tokens: int, min_tokens: int, least_weight: float = 1.0
) -> list[str]:
    """A line on each bin where no measured budget holds: which came closest, and what to try."""
    page = math.gcd(bin_tokens, *tails)
    lines = []
    for index in sorted({index for bins in tails.values() for index in bins}):
        found = closest(tails, index, target, bin_tokens, min_tokens, least_weight)
        if found is None:
            continue
        budget, tail = found
        end = whole_budget(tails, index, bin_tokens, least_weight)
        largest = max(each for each, bins in tails.items() if index in bins and each < end)
        between = (largest + end) // (2 * page) * page
        hints = []
        if (tail.tail_high or 0) >= target:
            hints.append("more prompts or --samples")
        if between > largest:
            hints.append(f"--budgets with {between}, and a --work of its own")
        if tail.tail_low:
            hints.append(f"a --target of at most {_floor(tail.tail_low)}")
        lines.append(
            f"positions {_positions(index, bin_tokens)}: no budget holds {target:g};"
            f" {_closest_words(budget, tail)}; try {', or '.join(hints) or 'longer prompts'}"
        )
    return lines


def nothing_holds(
    tails: Tails,
    target: float,
    num_bins: int,
    bin_tokens: int,
    min_tokens: int,
    least_weight: float = 1.0,
) -> str:
    missed = [
        (index, *found)
        for index in range(num_bins)
        if (found := closest(tails, index, target, bin_tokens, min_tokens, least_weight))
        is not None
    ]
    words = "the budgets hold every measured position whole"
    if missed:
        index, budget, tail = max(missed, key=lambda each: each[2].tail_low or 0)
        words = f"{_closest_words(budget, tail)}, at positions {_positions(index, bin_tokens)}"
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
