"""The measurements and choices of a calibration, as tables and sentences.

In: tails per budget and bin, and schedules made of them. Out: text.
"""

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
