"""Sections of calibrations: tail by position and budget, the schedules chosen, and their checks.

In: schedule files with their evidence, and check reports, as `sparrow calibrate` writes them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

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
    reading,
)
from sparrow_sglang.schedule import BudgetSchedule

_TAIL_LABEL = "acceptance rate, 5th percentile"
_POSITION_LABEL = "position (cached tokens)"
_BIN_HEADS = ("budget", "tail", "95 % from", "to", "tokens")
_WRITER = "sparrow calibrate"

Row = Mapping[str, Any]


def schedule_sections(schedules: dict[Path, dict[str, Any]], left_out: list[str]) -> list[Section]:
    """A section for the schedules of each measurement, one for each schedule without evidence.

    Files that hold no valid schedule are noted in `left_out`, with the reason.
    """
    measured: list[BudgetSchedule] = []
    plain: list[Section] = []
    for path, content in schedules.items():
        try:
            with reading(path, _WRITER):
                schedule = BudgetSchedule(**content)
                if "tails" in schedule.provenance:
                    _measured_section([schedule])
                    measured.append(schedule)
                else:
                    plain.append(_plain_section(schedule))
        except ReportError as error:
            left_out.append(str(error))

    def measurement(schedule: BudgetSchedule) -> str:
        evidence = schedule.provenance
        return f"{schedule.model} {schedule.bin_tokens} {evidence['settings']} {evidence['tails']}"

    measured.sort(key=lambda schedule: (measurement(schedule), schedule.tail_target or 0))
    return [_measured_section([*group]) for _, group in groupby(measured, key=measurement)] + plain


def check_section(path: Path, content: dict[str, Any]) -> Section:
    """Tails of fresh generations under given schedules. Raises `ReportError`."""
    with reading(path, f"{_WRITER} --check"):
        checks, settings = content["checks"], content["settings"]
        widths = {name: width for name, width, *_ in settings["schedules"]}
        sized = [(check, widths[check["schedule"]]) for check in checks]
        verdicts = [f"{c['schedule']} {'holds' if c['holds'] else 'does not hold'}" for c in checks]
        tokens = sum(row["tokens"] for check in checks for row in check["bins"])
        return Section(
            kind="check",
            title=f"Check on {content['model']}",
            facts=[("verdict", ", ".join(verdicts)), ("sparsely decoded tokens", number(tokens))],
            figures=[_check_figure(check, width) for check, width in sized],
            tables=[
                _bin_table(f"Checked bins of {check['schedule']}", check["bins"], width)
                for check, width in sized
            ],
            settings=[
                Settings("Configuration", flat(settings)),
                Settings("Versions", provenance(content)),
            ],
        )


def _measured_section(schedules: Sequence[BudgetSchedule]) -> Section:
    """The section of schedules from one measurement, of which each contains the evidence."""
    first = schedules[0]
    evidence: Row = first.provenance
    targets = sorted({s.tail_target for s in schedules if s.tail_target})
    tokens = sum(row["tokens"] for rows in evidence["tails"].values() for row in rows)
    return Section(
        kind="calibration",
        title=f"Calibration of {first.model}",
        facts=[
            ("targets", ", ".join(f"{target:g}" for target in targets)),
            ("prompts", str(evidence["settings"].get("num_prompts", "–"))),
            ("sparsely decoded tokens", number(tokens)),
            ("selection", str(first.selection)),
            *_share_facts(schedules),
        ],
        figures=[_tail_map(schedules, evidence), _budget_figure(schedules)],
        tables=[
            *(_bins_of(schedule) for schedule in schedules),
            _tail_table(evidence, first.bin_tokens),
        ],
        settings=[
            Settings("Configuration", flat(evidence["settings"])),
            Settings("Versions", provenance(evidence)),
        ],
    )


def _bins_of(schedule: BudgetSchedule) -> Table:
    bins: Any = schedule.provenance["bins"]
    return _bin_table(f"Bins of {schedule.name}", bins, schedule.bin_tokens)


def _tail_map(schedules: Sequence[BudgetSchedule], evidence: Row) -> Figure:
    """Measured tails by position and budget, and the budgets that each schedule uses."""
    budgets = sorted(map(int, evidence["tails"]))
    least = evidence["min_tokens"]
    filled = {
        int(budget): {row["bin"]: row["tail"] for row in rows if row["tokens"] >= least}
        for budget, rows in evidence["tails"].items()
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
        f" {least:,} tokens were. A line is a schedule; it has a gap where the"
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
            ("selection", str(schedule.selection)),
            *_share_facts([schedule]),
        ],
        figures=[_budget_figure([schedule])],
        tables=[Table("Budgets", ("positions", "KV budget"), rows)],
        settings=[Settings("Provenance", flat(schedule.provenance))] if schedule.provenance else [],
    )


def _share_facts(schedules: Sequence[BudgetSchedule]) -> list[tuple[str, str]]:
    """KV tokens that each schedule reads at the end of its last bin, and their share of all."""
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
    weighted = any(schedule.selection.layer_weights for schedule in schedules)
    layers = "layers of average weight read everything" if weighted else "decode is dense"
    return Figure(chart, f"Where the budget lies above the dashed line, {layers}.")


def _check_figure(check: Row, width: int) -> Figure:
    judged = [
        row
        for row in check["bins"]
        if row["tokens"] >= check["min_tokens"] and row.get("tail_low") is not None
    ]
    line = Line(
        check["schedule"],
        [(row["bin"] + 0.5) * width for row in judged],
        [row["tail"] for row in judged],
        PALETTE[0],
        low=[row["tail_low"] for row in judged],
        high=[row["tail_high"] for row in judged],
    )
    chart = Chart(
        f"Tail under {check['schedule']}",
        _POSITION_LABEL,
        _TAIL_LABEL,
        [line],
        [(f"target {check['target']:g}", check["target"])],
    )
    return Figure(
        chart,
        "With its confidence band. A bin fails if the whole band lies below the target. Only bins"
        f" of {check['min_tokens']:,} tokens or more.",
    )


def _bin_table(title: str, bins: Sequence[Row], width: int) -> Table:
    basis = "basis" if "basis" in bins[0] else "verdict"
    rows = [
        (
            _span(row["bin"], width),
            row[basis],
            number(row["budget_tokens"]),
            *(_tail(row.get(key)) for key in ("tail", "tail_low", "tail_high")),
            number(row["tokens"]),
        )
        for row in bins
    ]
    return Table(title, ("positions", basis, *_BIN_HEADS), rows, words=2)


def _tail_table(evidence: Row, width: int) -> Table:
    bins = sorted({row["bin"] for rows in evidence["tails"].values() for row in rows})
    rows = []
    for budget, measured in sorted((int(key), rows) for key, rows in evidence["tails"].items()):
        by_bin = {row["bin"]: row["tail"] for row in measured}
        rows.append((number(budget), *(_tail(by_bin.get(index)) for index in bins)))
    return Table(
        "Tail by budget and position", ("KV budget", *(_span(i, width) for i in bins)), rows
    )


def _span(index: int, width: int) -> str:
    return f"{index * width:,}–{(index + 1) * width - 1:,}"


def _tail(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
