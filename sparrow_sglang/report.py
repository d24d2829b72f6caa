"""`sparrow report`: an HTML page about a run or a calibration, or the comparison of several runs. A
page loads no other files: its charts are inline SVG, whose text and colours follow its theme."""

import io
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from sparrow_sglang.calibration.samples import has_measurements
from sparrow_sglang.command_line import table
from sparrow_sglang.errors import InputError
from sparrow_sglang.mismatch.collapse import ALARM, ENTROPY, REWARD, TAIL
from sparrow_sglang.mismatch.token_bins import BIN_TOKENS
from sparrow_sglang.run_folder import METRICS_FILE, RESPONSES_FILE, RUN_FILE, read_rows, read_starts
from sparrow_sglang.schedules.schedule import BudgetSchedule

Row = Mapping[str, Any]
_Means = tuple[float | None, float | None]

PASS_RATE = "eval/pass_rate"
_TAIL_OF_BIN = f"{TAIL}_bin"
_TAIL_LABEL = "acceptance rate, 5th percentile"
_POSITION_LABEL = "position (cached tokens)"
_EXPECTED = (
    f"the {METRICS_FILE} of a training run, or schedules with their evidence and checks by"
    " `sparrow calibrate`"
)

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
# Title, unit, label of each metric, and a note. Without metrics: the tails by position.
_CHARTS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("Reward", "mean reward", {REWARD: "training", PASS_RATE: "held out, dense"}, ""),
    ("Response length", "tokens", {f"response_length/{k}": k for k in ("mean", "max")}, ""),
    ("Entropy", "nats", {ENTROPY: "dense policy"}, "Per token."),
    (
        "Acceptance rate of the rollouts",
        "acceptance rate",
        {TAIL: "5th percentile", "sparrow/accept_mean": "mean"},
        "Exact, from both whole distributions of measured tokens.",
    ),
    ("Tail by position", "acceptance rate", {}, "5th percentile, by first position of a bin."),
    ("Rollout throughput", "tokens/s", {"sparrow/rollout_tokens_per_s": "rollout"}, ""),
    (
        "KV tokens per generated token",
        "KV tokens",
        {f"sparrow/kv_tokens_{k}": k for k in ("cached", "read")},
        "What a sparse layer reads of what is cached of the sequence, mean over steps.",
    ),
    (
        "Rollout against dense policy",
        "nats per token",
        {"rollout_corr/k3_kl": "KL", "sparrow/distill_kl": "KL that DistillSparse lowers"},
        "KL(rollout ‖ dense), estimated from sampled tokens.",
    ),
)
_FROM_ZERO = ("tokens", "nats", "tokens/s", "KV tokens")

_GAP = f"{REWARD} - {PASS_RATE}"
_COMPARED = {
    PASS_RATE: "held-out pass rate",
    REWARD: "reward",
    _GAP: "reward less held-out pass rate",
    "sparrow/zero_std_fraction": "groups with equal rewards",
    "response_length/mean": "response length, tokens",
    ENTROPY: "entropy, nats",
    "sparrow/entropy_gap": "entropy, sparse less dense",
    "sparrow/distill_entropy_gap": "the same where the adapter learns",
    TAIL: "tail of the acceptance rate",
    "sparrow/kv_tokens_read": "KV tokens read",
    "sparrow/distill_scale": "scale of the adapter",
    "sparrow/distill_p05_scale0": "tail without the adapter",
    "sparrow/distill_p05_scale1": "tail with the adapter at scale 1",
    "rollout_corr/k3_kl": "KL, rollout to dense policy",
    "sparrow/rollout_tokens_per_s": "rollout, tokens/s",
    "timing_s/step": "seconds per step",
}
# Settings that may differ between runs of one arm.
_NOT_OF_AN_ARM = ("run_dir", "seed", "logging.", "checkpoint.")
_SPANS = ("at the end", "over the run")
_END = 0.2
_CONFIDENCE = 0.95

# Of medium lightness, to be seen on both black and white.
_PALETTE = ("#3f7fce", "#c4691c", "#2f8f6b", "#8a63c9", "#c9504f", "#2389a3", "#a07a14", "#7b8087")
_INK, _RULE = "#101010", "#dddddd"
_THEME = {_INK: "currentColor", _RULE: "var(--rule)"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


class ReportError(InputError):
    """Something cannot be reported on; the message names the file and what is expected."""


# -- finding and reading files


@dataclass
class Sources:
    runs: list[Path] = field(default_factory=list)
    schedules: dict[Path, Row] = field(default_factory=dict)
    checks: dict[Path, Row] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def find_sources(paths: Sequence[Path]) -> Sources:
    """Everything in these files and folders, except in hidden folders. Raises `ReportError` if a
    path does not exist or nothing can be reported on."""
    sources = Sources()
    for path in paths:
        if not path.exists():
            raise ReportError(f"{path}: no such file or folder; expected {_EXPECTED}")
        for file in _files(path):
            if file.name == METRICS_FILE:
                sources.runs.append(file.parent)
                continue
            try:
                content = json.loads(file.read_text("utf-8"))
            except (OSError, ValueError) as error:
                sources.left_out.append(f"{file}: not JSON ({error}); expected {_EXPECTED}")
                continue
            if isinstance(content, dict) and {"budget_tokens", "bin_tokens"} <= content.keys():
                sources.schedules[file] = content
            elif isinstance(content, dict) and "checks" in content:
                sources.checks[file] = content
    if not (sources.runs or sources.schedules or sources.checks):
        nothing = f"{', '.join(map(str, paths))}: nothing to report on; looked for {_EXPECTED}"
        raise ReportError((sources.left_out or [nothing])[0])
    return sources


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        # Of a run they are large, and hold nothing to report.
        skipped = "checkpoints" if METRICS_FILE in names else ""
        if has_measurements(Path(folder)):
            # Its schedules are for measuring.
            continue
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != skipped)
        names = [name for name in names if name == METRICS_FILE or name.endswith(".json")]
        yield from (Path(folder, name) for name in sorted(names))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors that a damaged file causes in the block into a `ReportError` that names it."""
    try:
        yield
    except ReportError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ReportError(f"{path}: {reason}; expected {_EXPECTED}") from None


@dataclass(frozen=True)
class Run:
    """A training run: rows of metrics by step, and its starts, as `rl.runs.run` records them."""

    folder: Path
    rows: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    @property
    def start(self) -> Row:
        return self.starts[-1] if self.starts else {}

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.start.get("config", {}))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of training steps, without those of evaluations alone."""
        return [row for row in self.rows if "timing_s/step" in row]

    @property
    def steps_done(self) -> int:
        return int(self.steps[-1]["step"]) + 1

    def cut(self, steps: int) -> "Run":
        """The run up to the evaluation after so many steps."""
        rows = [row for row in self.rows if row["step"] < steps]
        rate = self.curve(PASS_RATE).get(steps)
        if rate is not None:
            rows.append({"step": steps, PASS_RATE: rate})
        return replace(self, rows=rows)

    def curve(self, metric: str) -> dict[int, float]:
        """The metric by step. `_GAP` is that of one policy: a step evaluates before it samples."""
        if metric == _GAP:
            rewards, rates = self.curve(REWARD), self.curve(PASS_RATE)
            return {step: rewards[step] - rates[step] for step in rates if step in rewards}
        return {row["step"]: row[metric] for row in self.rows if metric in row}


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises `ReportError` if it has no step yet, or a file is damaged."""
    with _reading(folder / RUN_FILE):
        starts = read_starts(folder / RUN_FILE)
    with _reading(folder / METRICS_FILE):
        rows = dict[int, dict[str, Any]]()
        # An evaluation and the step that follows it have rows of their own.
        for row in read_rows(folder / METRICS_FILE):
            rows.setdefault(int(row["step"]), {}).update(row)
    run = Run(folder, [rows[step] for step in sorted(rows)], starts)
    if not run.steps:
        raise ReportError(f"{folder / METRICS_FILE}: holds no training step yet")
    return run


# -- the page


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    note: str


@dataclass
class Section:
    """A run, calibration or check. `tables` are title, heads and rows; `settings` title and values;
    `samples` headline, prompt and response."""

    kind: str
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = field(default_factory=list)
    settings: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    samples: list[tuple[str, str, str]] = field(default_factory=list)

    @contextmanager
    def chart(self, title: str, x_label: str, y_label: str, note: str = "") -> Iterator[Any]:
        """Axes for the block to plot on."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(_STYLE | {"svg.hashsalt": title}):
            # At this width the text can be read on a phone.
            figure = Figure(figsize=(4.5, 2.8), layout="constrained")
            axes = figure.subplots()
            axes.set(xlabel=x_label, ylabel=y_label, axisbelow=True)
            yield axes
            handles, labels = axes.get_legend_handles_labels()
            if len(labels) > 1:
                columns = max(1, min(6, 60 // (max(map(len, labels)) + 7)))
                figure.set_figheight(2.8 + 0.2 * -(-len(labels) // columns))
                figure.legend(handles, labels, loc="outside lower center", ncols=columns)
            svg = io.StringIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
        self.charts.append(Chart(title, svg.getvalue(), note))


def write_page(title: str, sources: Sources) -> str:
    """The page about runs and calibrations; adds to `sources.left_out`. Raises `ReportError` if
    nothing can be shown, or a package is missing."""
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        name = error.name
        raise ReportError(f"{name} is not installed; install sparrow-sglang[report]") from None
    sections = list(_sections(sources))
    if not sections:
        raise ReportError(sources.left_out[0])
    environment = Environment(
        loader=PackageLoader("sparrow_sglang", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    return environment.get_template("report.html.j2").render(
        title=title, sections=sections, version=version("sparrow-sglang")
    )


def _sections(sources: Sources) -> Iterator[Section]:
    """The sections in reading order; adds what is damaged to `sources.left_out`."""
    by_measurement: dict[str, list[tuple[Path, Row]]] = {}
    for path, content in sources.schedules.items():
        evidence = content.get("provenance") or {}
        tails = evidence.get("tails", str(path))
        measured = [content["bin_tokens"], evidence.get("settings"), tails]
        by_measurement.setdefault(json.dumps(measured), []).append((path, content))
    makers: list[tuple[Path, Callable[[], Section]]] = [
        *((folder, partial(_section_of_run, folder)) for folder in sources.runs),
        *(
            (group[0][0], partial(calibration_section, [content for _, content in group]))
            for group in by_measurement.values()
        ),
        *((path, partial(check_section, content)) for path, content in sources.checks.items()),
    ]
    for path, make in makers:
        try:
            with _reading(path):
                yield make()
        except ReportError as error:
            sources.left_out.append(str(error))


def _inline(chart: Chart, name: str) -> Any:
    """matplotlib's document as an element of the page, whose ids start with `name`."""
    from markupsafe import Markup

    # Drop matplotlib's style rule: it would apply to the whole page, which has the same rule.
    body = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", chart.svg, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body).replace("xlink:href", "href")
    for colour, theme in _THEME.items():
        body = body.replace(colour, theme)
    _, opening, body = re.split(r"(<svg\b[^>]*>)", body, maxsplit=1)
    box = re.findall(r'viewBox="([^"]*)"', opening)[0]
    head = Markup('<svg class="chart" viewBox="{box}" role="img"><title>{title}</title>')
    return head.format(box=box, title=chart.title) + Markup(body)


def _scale(axes: Any, whole: bool = False, from_zero: bool = False) -> None:
    """Few ticks with readable numbers, at whole positions if `whole`."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    if from_zero:
        axes.set_ylim(bottom=0)


def _level(axes: Any, name: str, level: float) -> None:
    label = f"{name} {level:,g}"
    axes.axhline(level, color=_INK, linewidth=1.1, linestyle="--", label=label, gid="level")


def _style(index: int, label: str) -> dict[str, Any]:
    return {"color": _PALETTE[index % len(_PALETTE)], "label": label, "gid": f"series-{index}"}


def number(value: float | None, digits: int = 4) -> str:
    """Whole numbers whole, others to `digits` significant digits."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def flat(values: Row, prefix: str = "") -> dict[str, str]:
    named: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            named |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            named[prefix + key] = ", ".join(map(str, value)) or "none"
        else:
            named[prefix + key] = "none" if value is None else str(value)
    return named


def _versions(fields: Row) -> dict[str, str]:
    packages = {name: each for name, each in fields.get("packages", {}).items() if each}
    names = ("date", "device", "python", "commit", "command")
    return flat({name: fields[name] for name in names if name in fields} | packages)


# -- a training run


def _section_of_run(folder: Path) -> Section:
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
    shown_software: dict[str, str] = {}
    for start in run.starts:
        software = _versions(start | {"date": "", "command": ""})
        if software != shown_software:
            section.settings.append((f"Versions from step {start['step']} on", _versions(start)))
        shown_software = software
    with _reading(folder / RESPONSES_FILE):
        section.samples += _samples(read_rows(folder / RESPONSES_FILE))
    return section


def _run_facts(run: Run) -> list[tuple[str, str]]:
    planned, schedule = run.config.get("steps"), run.config.get("engine", {}).get("schedule")
    facts = [("steps", f"{len(run.steps):,}" + (f" of {planned:,}" if planned else ""))]
    changing = {
        "reward, first → last": REWARD,
        "held-out pass rate": PASS_RATE,
        "mean response length": "response_length/mean",
        "entropy": ENTROPY,
        "tail": TAIL,
    }
    for label, name in changing.items():
        if values := list(run.curve(name).values()):
            facts.append((label, f"{number(values[0], 3)} → {number(values[-1], 3)}"))
    if tails := run.curve(TAIL):
        lowest, target = min(tails, key=lambda step: tails[step]), run.start.get("tail_target")
        judged = f"the target is {target:g}" if target else "no target"
        if target and (below := sum(tail < target for tail in tails.values())):
            judged = f"BELOW the target {target:g} in {below:,} of {len(tails):,} steps"
        facts.append(("lowest tail", f"{number(tails[lowest], 3)} at step {lowest}; {judged}"))
    if alarms := [step for step, alarm in run.curve(ALARM).items() if alarm]:
        steps = f"{len(alarms):,} steps, the first is {alarms[0]:,}"
        facts.append(("ALARM, the policy may be collapsing", steps))
    if skipped := sum(run.curve("actor/skipped_steps").values()):
        facts.append(("optimizer steps skipped, gradient not finite", f"{skipped:,.0f}"))
    if schedule:
        facts.append(("schedule", schedule))
    last = run.steps[-1]
    if "sparrow/kv_tokens_cached" in last:
        share = last["sparrow/kv_tokens_read"] / last["sparrow/kv_tokens_cached"]
        facts.append(("KV read of cached, last step", f"{share:.1%}"))
    seconds = median(row["timing_s/step"] for row in run.steps)
    return [*facts, ("seconds per step, median", number(seconds))]


def _run_charts(section: Section, run: Run) -> None:
    limit = run.config.get("rollout", {}).get("max_new_tokens")
    target = run.start.get("tail_target")
    levels = {"tokens": ("limit", limit), "acceptance rate": ("target", target)}
    moves = [
        after["step"] - 0.5
        for before, after in itertools.pairwise(run.starts)
        if before["config"].get("engine") != after["config"].get("engine")
    ]
    moved = " Dotted vertical lines: another engine configuration." if moves else ""
    names = {name for row in run.rows for name in row}
    bins = sorted(int(n.removeprefix(_TAIL_OF_BIN)) for n in names if n.startswith(_TAIL_OF_BIN))
    width = run.start.get("tail_bin_tokens") or BIN_TOKENS
    tails = {f"{_TAIL_OF_BIN}{index}": f"{index * width:,}+" for index in bins}
    of_sets = {n: m[1] for n in sorted(names) if (m := re.fullmatch("eval/(.+)/pass_rate", n))}
    for title, unit, metrics, note in _CHARTS:
        labels = (metrics or tails) | (of_sets if PASS_RATE in metrics else {})
        curves = {text: run.curve(name) for name, text in labels.items() if name in names}
        if not curves:
            continue
        with section.chart(title, "step", unit, (note + moved).strip()) as axes:
            for i, (label, curve) in enumerate(curves.items()):
                # Unclipped, as a marker at 0 would be cut in half.
                style = _style(i, label) | {"clip_on": False}
                marker = "o" if len(curve) <= _SHOWN_STEPS else None
                axes.plot(list(curve), list(curve.values()), marker=marker, **style)
            label, level = levels.get(unit, ("", None))
            if level is not None:
                _level(axes, label, level)
            for move in moves:
                axes.axvline(move, color=_INK, linewidth=0.9, linestyle=":")
            _scale(axes, whole=True, from_zero=unit in _FROM_ZERO)
    with section.chart("Where the time of a step goes", "step", "seconds") as axes:
        _stack_times(axes, run.steps)


def _stack_times(axes: Any, steps: Sequence[Row]) -> None:
    """The time of each stage of a step, in order; the rest is the time that no stage measured."""
    stages = dict.fromkeys(n for row in steps for n in row if n.startswith("timing_s/"))
    del stages["timing_s/step"]
    spent = {n.removeprefix("timing_s/"): [row.get(n, 0.0) for row in steps] for n in stages}
    measured = [sum(row.get(name, 0.0) for name in stages) for row in steps]
    spent["rest"] = [
        max(0.0, row["timing_s/step"] - part) for row, part in zip(steps, measured, strict=True)
    ]
    at = [row["step"] for row in steps]
    if len(steps) == 1:
        # With one step the areas would have no width, so draw it half a step to either side.
        at, spent = [at[0] - 0.5, at[0] + 0.5], {name: s * 2 for name, s in spent.items()}
    colours = [_PALETTE[i % len(_PALETTE)] for i in range(len(spent))]
    areas = axes.stackplot(at, *spent.values(), labels=list(spent), colors=colours, alpha=0.85)
    for i, area in enumerate(areas):
        area.set_gid(f"series-{i}")
    _scale(axes, whole=True, from_zero=True)


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


# -- calibrations


def calibration_section(contents: Sequence[Row]) -> Section:
    """Schedules of one measurement, with its evidence."""
    schedules = [BudgetSchedule(**content) for content in contents]
    schedules.sort(key=lambda schedule: schedule.tail_target or 0)
    first = schedules[0]
    targets = [f"{s.tail_target:g}" if s.tail_target else "none" for s in schedules]
    section = Section("calibration", f"Calibration of {first.model}")
    section.facts += [("tail target", ", ".join(targets)), ("selection", first.selection)]
    for schedule in schedules:
        end = len(schedule.budget_tokens) * schedule.bin_tokens
        read = int(schedule.tokens_read(end))
        share = f"{number(read)} ({read / end:.1%})"
        section.facts.append((f"{schedule.name} reads at {end:,} tokens", share))
    evidence: Row = first.provenance
    tokens = sum(row["tokens"] for rows in evidence["tails"].values() for row in rows)
    prompts = str(evidence["settings"].get("num_prompts", "–"))
    section.facts += [("prompts", prompts), ("sparsely decoded tokens", number(tokens))]
    for schedule in schedules:
        bins: Any = schedule.provenance["bins"]
        _bin_table(section, f"Bins of {schedule.name}", bins, "basis", schedule.bin_tokens)
    section.tables.append(_tail_table(evidence, first.bin_tokens))
    versions = ("Versions", _versions(evidence))
    section.settings += [("Configuration", flat(evidence["settings"])), versions]
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
        name, target = check["schedule"], check["target"]
        width = check.get("bin_tokens", widths[name])
        judged = [
            row
            for row in check["bins"]
            if row["tokens"] >= check["min_tokens"] and row.get("tail_low") is not None
        ]
        note = (
            "A bin fails if its whole confidence band lies below the target. Only bins of"
            f" {check['min_tokens']:,} tokens or more."
        )
        with section.chart(f"Tail under {name}", _POSITION_LABEL, _TAIL_LABEL, note) as axes:
            at = [(row["bin"] + 0.5) * width for row in judged]
            tails, low, high = (
                [row[key] for row in judged] for key in ("tail", "tail_low", "tail_high")
            )
            axes.plot(at, tails, marker="o", **_style(0, name))
            axes.fill_between(at, low, high, color=_PALETTE[0], alpha=0.16, linewidth=0)
            _level(axes, "target", target)
            _scale(axes)
        _bin_table(section, f"Checked bins of {name}", check["bins"], "verdict", width)
    section.settings += [("Configuration", flat(settings)), ("Versions", _versions(content))]
    return section


def _budget_chart(section: Section, schedules: Sequence[BudgetSchedule]) -> None:
    end = max(len(s.budget_tokens) * s.bin_tokens for s in schedules)
    note = "Where the budget lies above the dashed line, decode is dense."
    with section.chart("KV budget by length", _POSITION_LABEL, "KV tokens read", note) as axes:
        for i, schedule in enumerate(schedules):
            edges = [n * schedule.bin_tokens for n in range(len(schedule.budget_tokens) + 1)]
            style = _style(i, schedule.name) | {"baseline": None, "linewidth": 1.8}
            axes.stairs(schedule.budget_tokens, edges, **style)
        axes.plot([0, end], [0, end], "--", color=_PALETTE[-1], label="all that is cached")
        _scale(axes, whole=True)
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


# -- several runs


def compare(sources: Sources) -> dict[str, Any]:
    """Several runs by arm, as JSON values: runs whose settings differ in no more than the seed.
    Each quantity has values, mean and difference from the first arm as `_compared` gives them, at
    the end of a run and over all of it. Steps that not all runs have taken are left out, which
    `sources.left_out` notes. Raises `ReportError` if fewer than two runs can be read."""
    runs = []
    for folder in sources.runs:
        try:
            runs.append(read_run(folder))
        except ReportError as error:
            sources.left_out.append(str(error))
    if len(runs) < 2:
        reasons = "; ".join(sources.left_out)
        raise ReportError(f"expected two or more runs to compare, got {len(runs)}: {reasons}")
    shortest = min(runs, key=lambda run: run.steps_done)
    end = shortest.steps_done
    if any(run.steps_done > end for run in runs):
        sources.left_out.append(f"steps after {end}, which {shortest.folder} has not taken")
    runs = [run.cut(end) for run in runs]
    arms = _arms(runs)
    values = {
        arm: {m: [_summary(run, m) for run in group] for m in _COMPARED}
        for arm, group in arms.items()
    }
    first = next(iter(values.values()))
    fields = ("device", "python", "packages", "commit")
    origins = [{name: run.start.get(name) for name in fields} for run in runs]
    settings = [_compared_settings(run.config) for run in runs]
    return {
        "made_by": [each for i, each in enumerate(origins) if each not in origins[:i]],
        "settings": {
            name: value
            for name, value in settings[0].items()
            if value != "off" and all(other.get(name) == value for other in settings)
        },
        "interval": "95 % over runs: Student's t, Welch's for differences from the first arm",
        "arms": [
            {
                "arm": arm,
                "seeds": [run.config.get("seed", 0) for run in group],
                "steps": [run.steps_done for run in group],
                **{
                    metric: _compared(values[arm][metric], first[metric] if index else ())
                    for metric in _COMPARED
                    if any(run.curve(metric) for run in group)
                },
            }
            for index, (arm, group) in enumerate(arms.items())
        ],
    }


def comparison_table(comparison: Row) -> str:
    arms = comparison["arms"]
    letters = [chr(ord("A") + i % 26) * (1 + i // 26) for i in range(len(arms))]
    rows = [["mean at the end", *letters]]
    for metric, label in _COMPARED.items():
        if any(metric in arm for arm in arms):
            means = (arm.get(metric, {}).get(_SPANS[0], {}).get("mean") for arm in arms)
            rows.append([label, *map(_interval_text, means)])
    lines = [
        f"{letter}: {arm['arm']} ({len(arm['seeds'])} runs)"
        for letter, arm in zip(letters, arms, strict=True)
    ]
    return "\n".join([*lines, table(rows), "±: half of the 95 % interval over the runs of an arm"])


def _interval_text(interval: Row | None) -> str:
    if interval is None:
        return "–"
    half = "" if interval["half"] is None else f" ± {number(interval['half'], 2)}"
    return f"{number(interval['value'], 3)}{half}"


def _arms(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by arm, which is named by the settings in which the runs differ."""
    settings = [_compared_settings(run.config) for run in runs]
    names = sorted({name for values in settings for name in values})
    differing = [n for n in names if len({values.get(n) for values in settings} - {"off"}) > 1]
    arms: dict[str, list[Run]] = {}
    for run, values in zip(runs, settings, strict=True):
        name = ", ".join(f"{n}={v}" for n in differing if (v := values.get(n, "–")) != "off")
        arm = (name or "all") if run.config else run.folder.name
        arms.setdefault(arm, []).append(run)
    return arms


def _compared_settings(config: Row) -> dict[str, str]:
    """Settings by name; those of a part that is switched off are all "off"."""
    values = flat(config)
    switches = {name for name in values if name.endswith(".enabled")}
    off = tuple(name.removesuffix("enabled") for name in switches if values[name] == "False")
    return {
        name: "off" if name.startswith(off) and name not in switches else value
        for name, value in values.items()
        if not name.startswith(_NOT_OF_AN_ARM)
    }


def _summary(run: Run, metric: str) -> _Means:
    """Means over the last fifth of the steps that have the metric, and over all of them."""
    values = list(run.curve(metric).values())
    if not values:
        return None, None
    return mean(values[-max(1, round(len(values) * _END)) :]), mean(values)


def _compared(of_runs: Sequence[_Means], first: Sequence[_Means]) -> dict[str, Any]:
    """By span: values of an arm's runs, their mean and its difference from the `first` arm's."""
    compared = {}
    for i, span in enumerate(_SPANS):
        values = [value for means in of_runs if (value := means[i]) is not None]
        others = [value for means in first if (value := means[i]) is not None]
        compared[span] = {
            "values": [means[i] for means in of_runs],
            "mean": interval(values) if values else None,
            "difference": interval(values, others) if values and others else None,
        }
    return compared


def interval(values: Sequence[float], others: Sequence[float] = ()) -> dict[str, float | None]:
    """Mean of independent values less that of `others`, and half of its 95 % interval. `half` is
    None where a side has one value. Freedom is Welch's approximation."""
    from scipy.stats import ttest_1samp, ttest_ind

    value = mean(values) - (mean(others) if others else 0.0)
    if len(values) < 2 or len(others) == 1:
        return {"value": value, "half": None}
    # Of equal values the interval is not a number, or one that scipy warns of.
    with warnings.catch_warnings(action="ignore"):
        test = ttest_ind(values, others, equal_var=False) if others else ttest_1samp(values, 0.0)
        low, high = test.confidence_interval(_CONFIDENCE)
    return {"value": value, "half": float(np.nan_to_num(high - low)) / 2}
