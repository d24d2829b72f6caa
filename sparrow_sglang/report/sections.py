"""The sections of a page: about a training run, about calibrations and about checks."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.report.page import (
    PALETTE,
    POSITION_LABEL,
    Section,
    draw_level,
    flat,
    number,
    scale,
    series,
    versions,
)
from sparrow_sglang.report.sources import PASS_RATE, Row, Run, read_run, reading
from sparrow_sglang.run_folder import ENTROPY, RESPONSES_FILE, REWARD, TAIL, read_rows
from sparrow_sglang.schedules.schedule import BudgetSchedule

_SHOWN_STEPS = 40
_STEP_COLUMNS = {
    "reward": REWARD,
    "pass rate": PASS_RATE,
    "length": "response_length/mean",
    "entropy": ENTROPY,
    "tail": TAIL,
    "acceptance": "sparrow/accept_mean",
    "KV read": "sparrow/kv_tokens_read",
    "KV cached": "sparrow/kv_tokens_cached",
    "tokens/s": "sparrow/rollout_tokens_per_s",
    "seconds": "timing_s/step",
}
# Title, unit, label of each metric, and a note.
_CHARTS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("Reward", "mean reward", {REWARD: "training", PASS_RATE: "held out, dense"}, ""),
    ("Response length", "tokens", {f"response_length/{k}": k for k in ("mean", "max")}, ""),
    (
        "Acceptance rate of the rollouts",
        "acceptance rate",
        {TAIL: "5th percentile", "sparrow/accept_mean": "mean"},
        "Exact, from both whole distributions of measured tokens.",
    ),
)


def run_section(folder: Path) -> Section:
    run = read_run(folder)
    section = Section("training", f"Training run {run.folder.resolve().name}", _run_facts(run))
    _run_charts(section, run)
    count = min(len(run.rows), _SHOWN_STEPS)
    shown = np.unique(np.linspace(0, len(run.rows) - 1, count).round().astype(int))
    columns = {head: name for head, name in _STEP_COLUMNS.items() if run.curve(name)}
    rows = [
        [str(row["step"]), *(number(row.get(name)) for name in columns.values())]
        for row in (run.rows[index] for index in shown)
    ]
    title = "Steps" if count == len(run.rows) else f"Steps, {count} of {len(run.rows):,}"
    section.tables.append((title, ("step", *columns), rows))
    if run.starts:
        section.settings.append(("Configuration", flat(run.config)))
        section.settings.append(("Versions", versions(run.start)))
    with reading(folder / RESPONSES_FILE):
        section.samples += _samples(read_rows(folder / RESPONSES_FILE))
    return section


def _run_facts(run: Run) -> list[tuple[str, str]]:
    planned = run.config.get("steps")
    facts = [("steps", f"{len(run.steps):,}" + (f" of {planned:,}" if planned else ""))]
    for head in ("reward", "pass rate", "length", "entropy", "tail"):
        if values := list(run.curve(_STEP_COLUMNS[head]).values()):
            change = f"{number(values[0], 3)} → {number(values[-1], 3)}"
            facts.append((f"{head}, first → last", change))
    if tails := run.curve(TAIL):
        lowest, target = min(tails, key=lambda step: tails[step]), run.start.get("tail_target")
        judged = f"the target is {target:g}" if target else "no target"
        if target and (below := sum(tail < target for tail in tails.values())):
            judged = f"BELOW the target {target:g} in {below:,} of {len(tails):,} steps"
        facts.append(("lowest tail", f"{number(tails[lowest], 3)} at step {lowest}; {judged}"))
    if skipped := sum(run.curve("actor/skipped_steps").values()):
        facts.append(("optimizer steps skipped, gradient not finite", f"{skipped:,.0f}"))
    return facts


def _run_charts(section: Section, run: Run) -> None:
    limit = run.config.get("rollout", {}).get("max_new_tokens")
    target = run.start.get("tail_target")
    levels = {"tokens": ("limit", limit), "acceptance rate": ("target", target)}
    names = {name for row in run.rows for name in row}
    of_sets = {n: m[1] for n in sorted(names) if (m := re.fullmatch("eval/(.+)/pass_rate", n))}
    for title, unit, metrics, note in _CHARTS:
        labels = metrics | (of_sets if PASS_RATE in metrics else {})
        curves = {text: run.curve(name) for name, text in labels.items() if name in names}
        if not curves:
            continue
        with section.chart(title, "step", unit, note) as axes:
            for i, (label, curve) in enumerate(curves.items()):
                # Unclipped, as a marker at 0 would be cut in half.
                style = series(i, label) | {"clip_on": False}
                marker = "o" if len(curve) <= _SHOWN_STEPS else None
                axes.plot(list(curve), list(curve.values()), marker=marker, **style)
            label, level = levels.get(unit, ("", None))
            if level is not None:
                draw_level(axes, label, level)
            scale(axes, whole=True, from_zero=unit == "tokens")


def _samples(rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Best and worst response of one group in each of at most four steps."""
    steps = sorted({row["step"] for row in rows})
    for index in sorted({round(i * (len(steps) - 1) / 3) for i in range(4)}) if steps else ():
        of_step = [row for row in rows if row["step"] == steps[index]]
        first = of_step[0]["task"], of_step[0]["prompt_id"]
        group = [row for row in of_step if (row["task"], row["prompt_id"]) == first]
        # A reward that could not be computed is null.
        group = [row for row in group if row["reward"] is not None] or group[:1]
        group.sort(key=lambda row: row["reward"] or 0.0, reverse=True)
        for row in [group[0], group[-1]] if group[1:] else group:
            scores = {"reward": row["reward"], **row["scores"], "tail": row.get("tail")}
            facts = [
                f"Step {row['step']}, {row['task']}/{row['prompt_id']}",
                *(f"{name} {number(value)}" for name, value in scores.items()),
                f"{row['length']:,} tokens, finish reason {row['finish_reason']}",
            ]
            prompt = _shortened(row.get("prompt", "–"), 1500)
            yield ", ".join(facts), prompt, _shortened(row["text"], 3000)


def _shortened(text: str, most: int) -> str:
    """Up to `most` characters of either end."""
    left_out = len(text) - 2 * most
    if left_out <= 0:
        return text
    return f"{text[:most]}\n[… {left_out:,} characters …]\n{text[-most:]}"


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
