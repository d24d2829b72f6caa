"""Sections of calibrations: tail by position and budget, the schedules chosen, and their checks.

In: schedule files with their evidence, and check reports, as `sparrow calibrate` writes them.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sparrow_sglang.report.calibration_files import (
    BinRow,
    Check,
    CheckFile,
    Evidence,
    parse,
)
from sparrow_sglang.report.charts import PALETTE, Chart, HeatMap, Line
from sparrow_sglang.report.page import (
    Figure,
    ReportError,
    Section,
    Settings,
    Table,
    flat,
    number,
    provenance,
)
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

_TAIL_LABEL = "acceptance rate, 5th percentile"
_POSITION_LABEL = "position (cached tokens)"
_BIN_HEADS = ("budget", "tail", "95 % from", "to", "tokens")


def schedule_sections(schedules: dict[Path, dict[str, Any]], left_out: list[str]) -> list[Section]:
    """A section for the schedules of each measurement, one for each schedule without evidence.

    What is no schedule goes to `left_out`, with the reason.
    """
    measured: list[tuple[BudgetSchedule, Evidence]] = []
    plain: list[BudgetSchedule] = []
    for path, content in schedules.items():
        try:
            schedule = BudgetSchedule(**content)
            if "tails" in schedule.provenance:
                measured.append((schedule, parse(path, Evidence, schedule.provenance)))
            else:
                plain.append(schedule)
        except ScheduleError as error:
            left_out.append(f"{path}: {error}")
        except ReportError as error:
            left_out.append(str(error))

    def measurement(pair: tuple[BudgetSchedule, Evidence]) -> str:
        schedule, evidence = pair
        return f"{schedule.model} {schedule.bin_tokens} {evidence.settings} {evidence.tails}"

    measured.sort(key=lambda pair: (measurement(pair), pair[0].tail_target or 0))
    groups = [list(pairs) for _, pairs in groupby(measured, key=measurement)]
    return [_measured_section(group) for group in groups] + [_plain_section(each) for each in plain]


def check_section(path: Path, content: dict[str, Any]) -> Section:
    """Tails of fresh generations under given schedules. Raises `ReportError`."""
    report = parse(path, CheckFile, content)
    widths = {name: width for name, width, *_ in report.settings.get("schedules", ())}
    for check in report.checks:
        if check.schedule not in widths:
            raise ReportError(
                f"{path}: settings.schedules: lacks {check.schedule!r}; expected what `sparrow"
                " calibrate --check` writes"
            )
    verdicts = [f"{c.schedule} {'holds' if c.holds else 'does not hold'}" for c in report.checks]
    tokens = sum(row.tokens for check in report.checks for row in check.bins)
    return Section(
        kind="check",
        title=f"Check on {report.model}",
        facts=[("verdict", ", ".join(verdicts)), ("sparsely decoded tokens", number(tokens))],
        figures=[_check_figure(check, widths[check.schedule]) for check in report.checks],
        tables=[
            _bin_table(f"Checked bins of {check.schedule}", check.bins, widths[check.schedule])
            for check in report.checks
        ],
        settings=[
            Settings("Configuration", flat(report.settings)),
            Settings("Versions", provenance(content)),
        ],
    )


def _measured_section(group: Sequence[tuple[BudgetSchedule, Evidence]]) -> Section:
    schedules = [schedule for schedule, _ in group]
    first, evidence = group[0]
    width = first.bin_tokens
    targets = sorted({s.tail_target for s in schedules if s.tail_target})
    tokens = sum(row.tokens for rows in evidence.tails.values() for row in rows)
    return Section(
        kind="calibration",
        title=f"Calibration of {first.model}",
        facts=[
            ("targets", ", ".join(f"{target:g}" for target in targets)),
            ("prompts", str(evidence.settings.get("num_prompts", "–"))),
            ("sparsely decoded tokens", number(tokens)),
            *_share_facts(schedules),
        ],
        figures=[_tail_map(schedules, evidence), _budget_figure(schedules)],
        tables=[
            *(_bin_table(f"Bins of {schedule.name}", own.bins, width) for schedule, own in group),
            _tail_table(evidence, width),
        ],
        settings=[
            Settings("Configuration", flat(evidence.settings)),
            Settings("Versions", provenance(first.provenance)),
        ],
    )


def _tail_map(schedules: Sequence[BudgetSchedule], evidence: Evidence) -> Figure:
    """Measured tails by position and budget, and which of the budgets each schedule takes."""
    budgets = sorted(evidence.tails)
    filled = {
        budget: {row.bin: row.tail for row in rows if row.tokens >= evidence.min_tokens}
        for budget, rows in evidence.tails.items()
    }
    bins = range(max((bin_ for row in filled.values() for bin_ in row), default=0) + 1)
    width = schedules[0].bin_tokens

    def chosen(schedule: BudgetSchedule) -> list[float]:
        wanted = [schedule.kv_budget_tokens(index * width + 1) for index in bins]
        return [float(budgets.index(each)) if each in budgets else math.nan for each in wanted]

    chart = HeatMap(
        "Tail by position and KV budget",
        _POSITION_LABEL,
        "KV budget, tokens",
        _TAIL_LABEL,
        edges=[index * width for index in range(len(bins) + 1)],
        rows=[f"{budget:,}" for budget in budgets],
        values=[[filled[budget].get(index, math.nan) for index in bins] for budget in budgets],
        paths=[(schedule.name, chosen(schedule)) for schedule in schedules],
    )
    return Figure(
        chart,
        "Measured under fixed budgets, over sparsely decoded tokens; empty where fewer than"
        f" {evidence.min_tokens:,} tokens were. A line is a schedule; it has a gap where the"
        " schedule takes a budget that was not measured, such as all there is.",
    )


def _plain_section(schedule: BudgetSchedule) -> Section:
    target = "none" if schedule.tail_target is None else f"{schedule.tail_target:g}"
    width = schedule.bin_tokens
    rows = [
        (_span(index, width), number(budget)) for index, budget in enumerate(schedule.budget_tokens)
    ]
    return Section(
        kind="schedule",
        title=f"Schedule {schedule.name}",
        facts=[
            ("calibrated", "yes" if schedule.calibrated else "no"),
            ("tail target", target),
            *_share_facts([schedule]),
        ],
        figures=[_budget_figure([schedule])],
        tables=[Table("Budgets", ("positions", "KV budget"), rows)],
        settings=[Settings("Provenance", flat(schedule.provenance))] if schedule.provenance else [],
    )


def _share_facts(schedules: Sequence[BudgetSchedule]) -> list[tuple[str, str]]:
    """Tokens read at the end of the schedule's bins, of those cached."""
    facts = []
    for schedule in schedules:
        end = len(schedule.budget_tokens) * schedule.bin_tokens
        read = int(schedule.tokens_read(end))
        facts.append(
            (f"{schedule.name} reads at {end:,} tokens", f"{number(read)} ({read / end:.1%})")
        )
    return facts


def _budget_figure(schedules: Sequence[BudgetSchedule]) -> Figure:
    end = max(len(s.budget_tokens) * s.bin_tokens for s in schedules)
    top = max(max(s.budget_tokens) for s in schedules) * 1.1
    lines = [
        Line(
            label=schedule.name,
            x=[i * schedule.bin_tokens for i in range(len(schedule.budget_tokens) + 1)],
            y=schedule.budget_tokens,
            colour=PALETTE[i % len(PALETTE)],
            stairs=True,
        )
        for i, schedule in enumerate(schedules)
    ]
    lines.append(Line("all that is cached", [0, end], [0, end], PALETTE[-1], dashed=True))
    chart = Chart(
        "KV budget by length", _POSITION_LABEL, "KV tokens read", lines, from_zero=True, top=top
    )
    return Figure(chart, "Where the budget lies above the dashed line, decode is dense.")


def _check_figure(check: Check, width: int) -> Figure:
    judged = [
        (row, row.interval)
        for row in check.bins
        if row.interval is not None and row.tokens >= check.min_tokens
    ]
    line = Line(
        check.schedule,
        [(row.bin + 0.5) * width for row, _ in judged],
        [tail for _, (tail, _, _) in judged],
        PALETTE[0],
        low=[low for _, (_, low, _) in judged],
        high=[high for _, (_, _, high) in judged],
    )
    chart = Chart(
        f"Tail under {check.schedule}",
        _POSITION_LABEL,
        _TAIL_LABEL,
        [line],
        [(f"target {check.target:g}", check.target)],
    )
    return Figure(
        chart,
        "With its confidence band. A bin fails if the whole band lies below the target. Only bins"
        f" of {check.min_tokens:,} tokens or more.",
    )


def _bin_table(title: str, bins: Sequence[BinRow], width: int) -> Table:
    rows = [
        (
            _span(row.bin, width),
            row.basis or row.verdict,
            number(row.budget_tokens),
            *(_tail(value) for value in (row.tail, row.tail_low, row.tail_high)),
            number(row.tokens),
        )
        for row in bins
    ]
    basis = "basis" if any(row.basis for row in bins) else "verdict"
    return Table(title, ("positions", basis, *_BIN_HEADS), rows, words=2)


def _tail_table(evidence: Evidence, width: int) -> Table:
    bins = sorted({row.bin for rows in evidence.tails.values() for row in rows})
    rows = []
    for budget, measured in sorted(evidence.tails.items()):
        by_bin = {row.bin: row.tail for row in measured}
        rows.append((number(budget), *(_tail(by_bin.get(index)) for index in bins)))
    return Table(
        "Tail by budget and position", ("KV budget", *(_span(i, width) for i in bins)), rows
    )


def _span(index: int, width: int) -> str:
    return f"{index * width:,}–{(index + 1) * width - 1:,}"


def _tail(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
