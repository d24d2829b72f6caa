"""The sections about calibrations and checks."""

from collections.abc import Sequence
from typing import Any

from sparrow_sglang.report.page import (
    PALETTE,
    POSITION_LABEL,
    Section,
    flat,
    number,
    scale,
    series,
    versions,
)
from sparrow_sglang.report.sources import Row
from sparrow_sglang.schedules.schedule import BudgetSchedule


def calibration_section(contents: Sequence[Row]) -> Section:
    """Schedules of one measurement, with its evidence."""
    schedules = [BudgetSchedule(**content) for content in contents]
    schedules.sort(key=lambda schedule: schedule.tail_target or 0)
    first = schedules[0]
    targets = [f"{s.tail_target:g}" if s.tail_target else "none" for s in schedules]
    section = Section("calibration", f"Calibration of {first.model}")
    section.facts += [("tail target", ", ".join(targets)), ("selection", first.selection)]
    evidence: Row = first.provenance
    tokens = sum(row["tokens"] for rows in evidence["tails"].values() for row in rows)
    prompts = str(evidence["settings"].get("num_prompts", "–"))
    section.facts += [("prompts", prompts), ("sparsely decoded tokens", number(tokens))]
    for schedule in schedules:
        bins: Any = schedule.provenance["bins"]
        _bin_table(section, f"Bins of {schedule.name}", bins, "basis", schedule.bin_tokens)
    section.tables.append(_tail_table(evidence, first.bin_tokens))
    section.settings.append(("Configuration", flat(evidence["settings"])))
    section.settings.append(("Versions", versions(evidence)))
    _budget_chart(section, schedules)
    return section


def check_section(content: Row) -> Section:
    checks, settings = content["checks"], content["settings"]
    widths = {name: width for name, width, *_ in settings["schedules"]}
    verdicts = [f"{c['schedule']} {'holds' if c['holds'] else 'does not hold'}" for c in checks]
    tokens = sum(row["tokens"] for check in checks for row in check["bins"])
    section = Section("check", f"Check on {content['model']}")
    section.facts += [("verdict", ", ".join(verdicts)), ("sparsely decoded tokens", number(tokens))]
    for check in checks:
        name = check["schedule"]
        width = check.get("bin_tokens", widths[name])
        _bin_table(
            section, f"Bins of {name}, target {check['target']:g}", check["bins"], "verdict", width
        )
    section.settings += [("Configuration", flat(settings)), ("Versions", versions(content))]
    return section


def _budget_chart(section: Section, schedules: Sequence[BudgetSchedule]) -> None:
    end = max(len(s.budget_tokens) * s.bin_tokens for s in schedules)
    note = "Where the budget lies above the dashed line, decode is dense."
    with section.chart("KV budget by length", POSITION_LABEL, "KV tokens read", note) as axes:
        for i, schedule in enumerate(schedules):
            edges = [n * schedule.bin_tokens for n in range(len(schedule.budget_tokens) + 1)]
            style = series(i, schedule.name) | {"baseline": None, "linewidth": 1.8}
            axes.stairs(schedule.budget_tokens, edges, **style)
        axes.plot([0, end], [0, end], "--", color=PALETTE[-1], label="all that is cached")
        scale(axes, whole=True)
        axes.set_ylim(0, max(max(s.budget_tokens) for s in schedules) * 1.1)


def _bin_table(section: Section, title: str, bins: Sequence[Row], verdict: str, width: int) -> None:
    heads = ["positions", verdict, "budget", "tail", "95 % from", "to", "tokens"]
    rows = []
    for row in bins:
        tails = [_rate(row.get(key)) for key in ("tail", "tail_low", "tail_high")]
        budget, tokens = number(row["budget_tokens"]), number(row["tokens"])
        rows.append([_span(row["bin"], width), row[verdict], budget, *tails, tokens])
    section.tables.append((title, heads, rows))


def _tail_table(evidence: Row, width: int) -> tuple[str, Sequence[str], list[list[str]]]:
    bins = sorted({row["bin"] for rows in evidence["tails"].values() for row in rows})
    rows = []
    for budget, measured in sorted((int(key), rows) for key, rows in evidence["tails"].items()):
        by_bin = {row["bin"]: row["tail"] for row in measured}
        rows.append([number(budget), *(_rate(by_bin.get(index)) for index in bins)])
    return "Tail by budget and position", ["KV budget", *(_span(i, width) for i in bins)], rows


def _span(index: int, width: int) -> str:
    return f"{index * width:,}–{(index + 1) * width - 1:,}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
