"""Sections of benchmark results: step time and throughput by length, rollouts over time.

In: result files, as `sparrow bench` writes them. Out: one section for all decode steps, which are
compared across files, and one section per other result. Results for which there are no charts are
shown as a table.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.report.charts import PALETTE, Chart, Line
from sparrow_sglang.report.learning import LearningRun, learning_section
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
    scalars,
)
from sparrow_sglang.report.result_files import Run, rerun_command
from sparrow_sglang.report.step_pairs import Pair, pair_rows, reading_order, served_model

_WIDEST = 8
_LENGTH = "cached tokens per sequence"
_STEP_NOTE = (
    "One decode step of stock SGLang. Floor: the bytes that the step must read over the copy"
    " bandwidth of the run."
)

Row = dict[str, Any]


def benchmark_sections(results: dict[Path, dict[str, Any]], left_out: list[str]) -> list[Section]:
    """Sections of all results. Damaged files are noted in `left_out`, with the reason."""
    steps: list[Run] = []
    others: list[Section] = []
    for path, content in results.items():
        try:
            with reading(path, "sparrow bench"):
                run = Run.checked(path.as_posix(), content)
                if "step_ms" in run.rows[0]:
                    _step_section([run])
                    steps.append(run)
                else:
                    others.append(_section(run))
        except ReportError as error:
            left_out.append(str(error))
    return ([_step_section(steps)] if steps else []) + others


def _section(run: Run) -> Section:
    """The section of one result of another kind than decode steps."""
    row, title = run.rows[0], Path(run.path).stem.replace("_", " ")
    if "curves" in row:
        curves = [
            LearningRun(r.get("arm") or r["schedule"], r["seed"], r["curves"]) for r in run.rows
        ]
        return learning_section(curves, title, _versions(run))
    facts = [("device", run.content["device"])]
    figures: list[Figure] = []
    tables: list[Table] = []
    if "curve" in row:
        title, facts, figures = f"Rollout of {row['model']}", _rollout_facts(run), _rollout(run)
        tables = [_scalar_table("Both sides", run.rows)]
    elif "tails" in row:
        trained = dict.fromkeys(r["trained_under"] for r in run.rows)
        facts.append(("adapter trained under", ", ".join(trained)))
        figures = list(_distillation(run))
    else:
        facts.append(("rows", number(len(run.rows))))
        tables = [_scalar_table("Results", run.rows)]
    return Section("benchmark", title, facts, figures, tables, [_versions(run)])


def _step_section(runs: list[Run]) -> Section:
    pairs = sorted(pair_rows(runs), key=reading_order)
    facts = [("devices", ", ".join(dict.fromkeys(run.device for run in runs)))]
    best = max((pair for pair in pairs if pair.speedup), key=_speedup, default=None)
    if best:
        row = best.sparse
        facts.append((f"largest speed-up: {best.model}, {row['case']}", f"{best.speedup:.2f}×"))
        facts.append(("with schedule", row["schedule"]))
    cells = [_cells(pair) for pair in pairs]
    heads = list(cells[0]) if cells else ()
    return Section(
        kind="benchmark",
        title="Decode steps",
        facts=facts,
        figures=[figure for run in runs for figure in _length_figures(run)],
        tables=[Table("Sparse against dense", heads, [[*row.values()] for row in cells], words=4)],
        settings=[_versions(run) for run in runs],
    )


def _speedup(pair: Pair) -> float:
    return pair.speedup or 0.0


def _cells(pair: Pair) -> dict[str, str]:
    dense, sparse = pair.dense or {}, pair.sparse
    return {
        "model": pair.model,
        "SGLang": pair.run.sglang,
        "schedule": sparse["schedule"],
        "case": sparse["case"].replace("x", " × "),
        "dense ms": number(dense.get("step_ms")),
        "sparse ms": number(sparse["step_ms"]),
        "speed-up": "–" if pair.speedup is None else f"{pair.speedup:.2f}×",
        "floor ms": number(sparse["floor_ms"]),
        "dense tokens/s": number(dense.get("tokens_per_s")),
        "sparse tokens/s": number(sparse["tokens_per_s"]),
    }


def _length_figures(run: Run) -> Iterator[Figure]:
    """Step time and throughput of each model and batch that was timed at several lengths."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in run.rows:
        # A batch of mixed lengths has no single length to plot it at.
        if not row["case"].startswith("fill:"):
            groups.setdefault((served_model(row), row["batch"]), []).append(row)
    name = Path(run.path).name
    for (model, batch), rows in groups.items():
        if len({_length(row) for row in rows}) < 2:
            continue
        sparse = [row for row in rows if row["schedule"]]
        times = _lines(rows, "step_ms") + _lines(sparse, "floor_ms", "floor of ", dashed=True)
        title = f"{model}, {batch} sequences"
        chart = Chart(f"{title}: step time", _LENGTH, "ms", times, from_zero=True)
        yield Figure(chart, f"{_STEP_NOTE} {name}.")
        speeds = _lines(rows, "tokens_per_s")
        chart = Chart(f"{title}: throughput", _LENGTH, "tokens/s", speeds, from_zero=True)
        yield Figure(chart, f"All sequences together. {name}.")


def _length(row: Row) -> float:
    length: float = row["cached_tokens"] / row["batch"]
    return length


def _label(row: Row) -> str:
    return row["schedule"] or f"{row['backend']}, dense"


def _lines(rows: Sequence[Row], field: str, prefix: str = "", dashed: bool = False) -> list[Line]:
    """A line per backend and schedule, sparse ones first."""
    lines = []
    for i, (is_dense, label) in enumerate(sorted({(not r["schedule"], _label(r)) for r in rows})):
        points = sorted((_length(row), row[field]) for row in rows if _label(row) == label)
        colour = PALETTE[-1 - i % 2] if is_dense else PALETTE[i % (len(PALETTE) - 2)]
        x, y = zip(*points, strict=True)
        lines.append(Line(prefix + label, x, y, colour, dashed=dashed))
    return lines


def _rollout_facts(run: Run) -> list[tuple[str, str]]:
    facts = [(f"{_label(row)}, tokens/s", number(row["tokens_per_s"])) for row in run.rows]
    dense = max((row["tokens_per_s"] for row in run.rows if not row["schedule"]), default=None)
    if dense is not None:
        facts += [
            (f"speed-up of {_label(row)}", f"{row['tokens_per_s'] / dense:.2f}×")
            for row in run.rows
            if row["schedule"]
        ]
    return facts


def _rollout(run: Run) -> list[Figure]:
    def chart(title: str, unit: str, field: str) -> Chart:
        lines = [
            Line(
                _label(row),
                [point["s"] for point in row["curve"]],
                [point[field] for point in row["curve"]],
                PALETTE[i % (len(PALETTE) - 1)] if row["schedule"] else PALETTE[-1],
            )
            for i, row in enumerate(run.rows)
        ]
        return Chart(title, "seconds", unit, lines, from_zero=True)

    return [
        Figure(chart("Tokens generated", "tokens", "tokens")),
        Figure(chart("Throughput", "tokens/s", "tokens_per_s")),
        Figure(
            chart("Sequences that are not done", "sequences", "unfinished"),
            "All start together; the rollout lasts until the last one is done.",
        ),
    ]


def _distillation(run: Run) -> Iterator[Figure]:
    """A chart for each schedule: its tails without adapter, and with each adapter."""
    for which, schedule in run.content["schedules"].items():
        lines = [_tail_line("without adapter", run.content["before"][which], PALETTE[-1])]
        for row in run.rows:
            for tails in row["tails"]:
                label = f"after {tails['after']['step']} steps, lr {row['lr']:g}"
                lines.append(_tail_line(label, tails[which], PALETTE[len(lines) - 1]))
        title = f"Tail under {schedule['name']}"
        chart = Chart(title, "position (cached tokens)", "acceptance rate, 5th percentile", lines)
        yield Figure(chart, "With its 95 % confidence band, on held-out prompts.")


def _tail_line(label: str, bins: Sequence[Row], colour: str) -> Line:
    def ends(key: str) -> list[float]:
        return [math.nan if each[key] is None else each[key] for each in bins]

    middles = [(each["first_position"] + each["end_position"]) / 2 for each in bins]
    return Line(label, middles, ends("tail"), colour, ends("tail_low"), ends("tail_high"))


def _scalar_table(title: str, rows: Sequence[Row]) -> Table:
    """Every value of the rows that is no list; a wide and short table is transposed."""
    named = [scalars(row) for row in rows]
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


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return "–" if value is None else str(value)


def _versions(run: Run) -> Settings:
    configured = run.content.get("settings")
    recorded = provenance(run.content | {"command": rerun_command(run.content["command"])})
    name = Path(run.path).name
    values = flat(configured) if isinstance(configured, dict) else {}
    return Settings(f"Configuration and versions: {name}", values | recorded)
