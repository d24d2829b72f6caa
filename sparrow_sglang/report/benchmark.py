"""Sections of benchmark results: step time and throughput by length, rollouts over time.

In: result files, as `sparrow bench` writes them. Out: one section for all decode steps, which are
compared across files, and one for each other result; a result of a kind that has no charts is shown
as a table.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from sparrow_sglang.report.charts import PALETTE, Chart, Line
from sparrow_sglang.report.learning import LearningRun, learning_section
from sparrow_sglang.report.page import Figure, Section, Settings, Table, flat, number, provenance
from sparrow_sglang.report.result_files import Run, rerun_command
from sparrow_sglang.report.step_pairs import Pair, pair_rows, reading_order
from sparrow_sglang.validation import first_problem

_WIDEST = 8
_STEP_HEADS = (
    "model", "schedule", "case", "dense ms", "sparse ms", "speed-up", "floor ms", "dense tokens/s",
    "sparse tokens/s",
)  # fmt: skip
_STEP_NOTE = (
    "One decode step of stock SGLang. Floor: the bytes that the step must read over the copy"
    " bandwidth of the run."
)


class _Step(BaseModel):
    model: str
    backend: str
    case: str
    batch: int = Field(gt=0)
    cached_tokens: int
    step_ms: float = Field(gt=0)
    floor_ms: float
    tokens_per_s: float
    schedule: str | None

    @property
    def label(self) -> str:
        return self.schedule or f"{self.backend}, dense"

    @property
    def length(self) -> float:
        return self.cached_tokens / self.batch


class _Point(BaseModel):
    s: float
    tokens: float
    unfinished: float
    tokens_per_s: float


class _Rollout(BaseModel):
    model: str
    backend: str
    schedule: str | None
    seconds: float
    output_tokens: int
    tokens_per_s: float = Field(gt=0)
    curve: list[_Point]

    @property
    def label(self) -> str:
        return self.schedule or f"{self.backend}, dense"


class _BinTail(BaseModel):
    first_position: int
    end_position: int
    tail: float
    tail_low: float | None
    tail_high: float | None


class _Named(BaseModel):
    name: str


class _AdapterRow(BaseModel):
    lr: float
    trained_under: str
    tails: list[dict[str, Any]] = Field(min_length=1)


class _Distillation(BaseModel):
    """Tails without an adapter, and of each adapter after some steps, by schedule and bin."""

    schedules: dict[str, _Named]
    before: dict[str, list[_BinTail]]
    rows: list[_AdapterRow]


class _Result(BaseModel):
    """What every result carries."""

    device: str
    packages: dict[str, str | None]
    commit: str
    command: str
    rows: list[dict[str, Any]] = Field(min_length=1)


def benchmark_sections(results: dict[Path, dict[str, Any]], left_out: list[str]) -> list[Section]:
    """Sections of all results. What is damaged goes to `left_out`, with the reason."""
    runs: list[Run] = []
    others: list[Section] = []
    for path, content in results.items():
        try:
            rows = _Result.model_validate(content).rows
            if "step_ms" in rows[0]:
                for row in rows:
                    _Step.model_validate(row)
                runs.append(Run(path.as_posix(), content))
            elif "curve" in rows[0]:
                replays = [_Rollout.model_validate(row) for row in rows]
                others.append(_rollout_section(path, content, replays))
            elif "before" in content and "tails" in rows[0]:
                others.append(
                    _distill_section(path, content, _Distillation.model_validate(content))
                )
            elif "curves" in rows[0]:
                learnt = [LearningRun.model_validate(row) for row in rows]
                title = path.stem.replace("_", " ")
                others.append(learning_section(learnt, title, _versions(path, content)))
            else:
                others.append(_other_section(path, content))
        except ValidationError as error:
            left_out.append(f"{path}: {first_problem(error)}; expected what `sparrow bench` writes")
    return ([_step_section(runs)] if runs else []) + others


def _step_section(runs: list[Run]) -> Section:
    pairs = sorted(pair_rows(runs), key=reading_order)
    figures = [figure for run in runs for figure in _length_figures(run)]
    compared = [(pair.speedup, pair) for pair in pairs if pair.speedup is not None]
    facts = [("devices", ", ".join(dict.fromkeys(run.device for run in runs)))]
    if compared:
        speedup, pair = max(compared, key=lambda each: each[0])
        row = pair.sparse
        facts.append((f"largest speed-up: {row['model']}, {row['case']}", f"{speedup:.2f}×"))
        facts.append(("with schedule", row["schedule"]))
    return Section(
        kind="benchmark",
        title="Decode steps",
        facts=facts,
        figures=figures,
        tables=[Table("Sparse against dense", _STEP_HEADS, [_cells(p) for p in pairs], words=3)],
        settings=[_versions(Path(run.path), run.content) for run in runs],
    )


def _cells(pair: Pair) -> list[str]:
    dense: dict[str, Any] = pair.dense or {}
    sparse = pair.sparse
    return [
        sparse["model"],
        sparse["schedule"],
        sparse["case"].replace("x", " × "),
        number(dense.get("step_ms")),
        number(sparse["step_ms"]),
        "–" if pair.speedup is None else f"{pair.speedup:.2f}×",
        number(sparse["floor_ms"]),
        number(dense.get("tokens_per_s")),
        number(sparse["tokens_per_s"]),
    ]


def _length_figures(run: Run) -> list[Figure]:
    """Step time and throughput of each model and batch that was timed at several lengths."""
    groups: dict[tuple[str, int], list[_Step]] = {}
    for row in run.rows:
        step = _Step.model_validate(row)
        # Sequences of mixed length have no one length to be drawn at.
        if not step.case.startswith("fill:"):
            groups.setdefault((step.model, step.batch), []).append(step)
    figures = []
    for (model, batch), steps in groups.items():
        if len({step.length for step in steps}) < 2:
            continue
        chart = _time_chart(f"{model}, {batch} sequences: step time", steps)
        figures.append(Figure(chart, f"{_STEP_NOTE} {Path(run.path).name}."))
        chart = Chart(
            f"{model}, {batch} sequences: throughput",
            "cached tokens per sequence",
            "tokens/s",
            _lines(steps, "tokens_per_s"),
            from_zero=True,
        )
        figures.append(Figure(chart, f"All sequences together. {Path(run.path).name}."))
    return figures


def _time_chart(title: str, steps: Sequence[_Step]) -> Chart:
    lines = _lines(steps, "step_ms")
    sparse = [step for step in steps if step.schedule]
    floors = _lines(sparse, "floor_ms", "floor of ", dashed=True)
    return Chart(title, "cached tokens per sequence", "ms", [*lines, *floors], from_zero=True)


def _lines(
    steps: Sequence[_Step], field: str, prefix: str = "", dashed: bool = False
) -> list[Line]:
    """A line per backend and schedule, sparse ones first."""
    labels = sorted({(step.schedule is None, step.label) for step in steps})
    lines = []
    for i, (is_dense, label) in enumerate(labels):
        own = sorted((step for step in steps if step.label == label), key=lambda step: step.length)
        lines.append(
            Line(
                prefix + label,
                [step.length for step in own],
                [getattr(step, field) for step in own],
                PALETTE[-1 - i % 2] if is_dense else PALETTE[i % (len(PALETTE) - 2)],
                dashed=dashed,
            )
        )
    return lines


def _rollout_section(path: Path, content: dict[str, Any], replays: list[_Rollout]) -> Section:
    def chart(title: str, unit: str, field: str) -> Chart:
        lines = [
            Line(
                replay.label,
                [point.s for point in replay.curve],
                [getattr(point, field) for point in replay.curve],
                PALETTE[i % (len(PALETTE) - 1)] if replay.schedule else PALETTE[-1],
            )
            for i, replay in enumerate(replays)
        ]
        return Chart(title, "seconds", unit, lines, from_zero=True)

    facts = [(f"{replay.label}, tokens/s", number(replay.tokens_per_s)) for replay in replays]
    dense = max((r.tokens_per_s for r in replays if not r.schedule), default=None)
    if dense is not None:
        facts += [
            (f"speed-up of {replay.label}", f"{replay.tokens_per_s / dense:.2f}×")
            for replay in replays
            if replay.schedule
        ]
    return Section(
        kind="benchmark",
        title=f"Rollout of {replays[0].model}",
        facts=facts,
        figures=[
            Figure(chart("Tokens generated", "tokens", "tokens")),
            Figure(chart("Throughput", "tokens/s", "tokens_per_s")),
            Figure(
                chart("Sequences that are not done", "sequences", "unfinished"),
                "All start together; the rollout lasts until the last one is done.",
            ),
        ],
        tables=[_scalar_table("Both sides", content["rows"])],
        settings=[_versions(path, content)],
    )


def _distill_section(path: Path, content: dict[str, Any], result: _Distillation) -> Section:
    """A chart for each schedule: its tails without adapter, and with each adapter."""
    figures = []
    for which, named in result.schedules.items():
        lines = [_tail_line("without adapter", result.before[which], PALETTE[-1])]
        for row in result.rows:
            for tails in row.tails:
                bins = [_BinTail.model_validate(one) for one in tails[which]]
                label = f"after {tails['after']['step']} steps, lr {row.lr:g}"
                lines.append(_tail_line(label, bins, PALETTE[len(lines) - 1]))
        title = f"Tail under {named.name}"
        chart = Chart(title, "position (cached tokens)", "acceptance rate, 5th percentile", lines)
        figures.append(Figure(chart, "With its 95 % confidence band, on held-out prompts."))
    trained = ", ".join(dict.fromkeys(row.trained_under for row in result.rows))
    return Section(
        kind="benchmark",
        title=path.stem.replace("_", " "),
        facts=[("device", content["device"]), ("adapter trained under", trained)],
        figures=figures,
        settings=[_versions(path, content)],
    )


def _tail_line(label: str, bins: Sequence[_BinTail], colour: str) -> Line:
    def end(value: float | None) -> float:
        return math.nan if value is None else value

    return Line(
        label,
        [(each.first_position + each.end_position) / 2 for each in bins],
        [each.tail for each in bins],
        colour,
        low=[end(each.tail_low) for each in bins],
        high=[end(each.tail_high) for each in bins],
    )


def _other_section(path: Path, content: dict[str, Any]) -> Section:
    return Section(
        kind="benchmark",
        title=path.stem.replace("_", " "),
        facts=[("device", content["device"]), ("rows", number(len(content["rows"])))],
        figures=[],
        tables=[_scalar_table("Results", content["rows"])],
        settings=[_versions(path, content)],
    )


def _scalar_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Every value of the rows that is no list; a wide and short table lies on its side."""
    named = [_scalars(row) for row in rows]
    names = list(dict.fromkeys(name for row in named for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in named]
    words = 0
    while words < len(names) and all(isinstance(r.get(names[words]), str | None) for r in named):
        words += 1
    if len(names) > _WIDEST and len(cells) < len(names):
        heads = [" ".join(row[:words]) for row in cells]
        turned = [[name, *(row[i] for row in cells)] for i, name in enumerate(names)]
        return Table(title, ("", *heads), turned[words:])
    return Table(title, names, cells, words=words)


def _scalars(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            named |= _scalars(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            named[prefix + key] = value
    return named


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return "–" if value is None else str(value)


def _versions(path: Path, content: dict[str, Any]) -> Settings:
    configured = flat(content["settings"]) if isinstance(content.get("settings"), dict) else {}
    recorded = provenance(content | {"command": rerun_command(content["command"])})
    return Settings(f"Configuration and versions: {path.name}", configured | recorded)
