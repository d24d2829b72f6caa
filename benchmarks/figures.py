"""The README's figures, drawn from the committed results and schedules.

`python -m sparrow_sglang.benchmarks.figures`, in a checkout, writes docs/figures: the speed-up of a
decode step against context, the pages and KV tokens that a step reads, and, for each measured
comparison of selection rules, the KV tokens read and the tail acceptance rate of each rule. Each
figure is drawn twice, for light and dark pages. The module imports neither torch nor SGLang.
"""

import argparse
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.result_files import ROOT, load_runs
from sparrow_sglang.report.charts import PALETTE
from sparrow_sglang.report.page import ReportError
from sparrow_sglang.report.result_files import Run
from sparrow_sglang.report.step_pairs import Pair, dense_backends, model_size, pair_rows
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

FIGURES = Path("docs/figures")
COMMAND = "python -m sparrow_sglang.benchmarks.figures"
TARGET = 0.86
# Sequences per step. Of the measured batch sizes, 16 covers the most models and contexts.
BATCH = 16

# Scores of the diagram's pages between the first and the last two. The scores are made up: the
# diagram shows the rule, not a measurement.
SCORES = (0.2, 0.7, 0.3, 0.1, 0.25, 0.9, 0.6, 0.15, 0.2, 0.35, 0.1, 0.8, 0.3, 0.2, 0.5, 0.15, 0.4)
KEPT = 8
LENGTHS = (4096, 8192, 16384, 32768)

LIGHT = {"ink": "#1f2328", "rule": "#d1d9e0", "fill": "#e6eaef"}
DARK = {"ink": "#e6edf3", "rule": "#3d444d", "fill": "#2a313c"}
CHOSEN, ALWAYS = PALETTE[:2]

Theme = Mapping[str, str]


@dataclass(frozen=True)
class Point:
    """Speed-up of one model at one number of cached tokens a sequence."""

    model: str
    context: int
    speedup: float
    pair: Pair


def speedup_points(runs: Sequence[Run]) -> list[Point]:
    """Steps of `BATCH` equally long sequences under each model's own schedule for `TARGET`.

    If a case was measured several times, the measurement with the smallest speed-up is used.
    """
    points: dict[tuple[str, int], Point] = {}
    for pair in pair_rows(runs):
        if pair.speedup is None or pair.sparse["schedule"] != f"{pair.model}-{TARGET}":
            continue
        batch, context = pair.shape or (0, 0)
        known = points.get((pair.model, context))
        if batch == BATCH and (known is None or pair.speedup < known.speedup):
            points[pair.model, context] = Point(pair.model, context, pair.speedup, pair)
    return sorted(points.values(), key=lambda point: (model_size(point.model), point.context))


def fullest_device(runs: Sequence[Run]) -> tuple[str, list[Point]]:
    """The device with the most `speedup_points`, and those points (none if no device has any)."""
    by_device = {
        device: speedup_points([run for run in runs if run.device == device])
        for device in sorted({run.device for run in runs})
    }
    device = max(by_device, key=lambda name: len(by_device[name]), default="")
    return device, by_device.get(device, [])


def draw_speedup(points: Sequence[Point], device: str, theme: Theme) -> Any:
    """Speed-up of a decode step against context, a line for each model, named at its end."""
    figure, axes = _figure(theme, 6.2, 4.3)
    lines = [
        [point for point in points if point.model == model]
        for model in dict.fromkeys(point.model for point in points)
    ]
    top, longest = (
        max(values) for values in zip(*((p.speedup, p.context) for p in points), strict=True)
    )
    heights = _apart([line[-1].speedup for line in lines], gap=0.07 * (top - 0.8))
    for colour, line, height in zip(PALETTE, lines, heights, strict=False):
        axes.plot(
            [point.context for point in line], [point.speedup for point in line],
            "o-", color=colour, linewidth=2.4, markersize=7,
        )  # fmt: skip
        name = line[0].model.replace("qwen3-", "Qwen3-").replace("b", "B")
        label = f"{name}  {line[-1].speedup:.2f}×"
        axes.text(1.04 * longest, height, label, va="center", color=colour, fontweight="bold")
    ticks = sorted({point.context for point in points if point.context >= 4096})
    axes.axhline(1, color=theme["ink"], linewidth=1.2, linestyle="--")
    axes.text(1.04 * longest, 1, "dense", va="bottom", color=theme["ink"])
    axes.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
    axes.set_xlim(0, 1.5 * longest)
    axes.set_ylim(0.8, 1.08 * top)
    axes.set_yticks(range(1, int(top) + 1))
    axes.yaxis.set_major_formatter("{x:.0f}×")
    axes.grid(axis="y")
    axes.set_xlabel("tokens in the KV cache of each sequence", loc="left")
    dense = dense_backends([point.pair for point in points])
    title = f"Speed-up over {dense} dense decode\nof one step, batch {BATCH}, {device}"
    axes.set_title(title)
    return figure


def draw_rules(run: Run, theme: Theme) -> Any:
    """By length and rule: above, KV tokens that a step reads for each target; below, the tail.

    The lower panels show the tails of the target nearest to `TARGET`, with their intervals; bins
    without an interval are left out.
    """
    figure, panels = _figure(theme, 6.2, 7.2, [["read", "read"], ["samples", "text"]])
    _draw_read(panels["read"], run.rows, run.content["model"])
    nearest = min((row["target"] for row in run.rows), key=lambda target: abs(target - TARGET))
    rows = [row for row in run.rows if row["target"] == nearest]
    panels["text"].sharey(panels["samples"])
    panels["text"].tick_params(labelleft=False)
    for name, title in (("samples", "fresh samples"), ("text", "other text")):
        axes = panels[name]
        for rule in dict.fromkeys(row["rule"] for row in rows):
            line = [row for row in rows if row["rule"] == rule]
            line = [row for row in line if row[name]["tail_low"] is not None]
            tails = [row[name]["tail"] for row in line]
            bars = [
                [row[name]["tail"] - row[name]["tail_low"] for row in line],
                [row[name]["tail_high"] - row[name]["tail"] for row in line],
            ]
            colour, style, shift = _rule_style(rule)
            lengths = [row["cached_tokens"] + shift for row in line]
            axes.errorbar(lengths, tails, bars, fmt=style, color=colour, markersize=5, capsize=3)
        axes.axhline(nearest, color=theme["ink"], linewidth=1.2, linestyle=":")
        axes.set_title(f"Tail for {nearest},\n{title}")
    for axes in panels.values():
        _label_lengths(axes, run.rows)
    return figure


def _draw_read(axes: Any, rows: Sequence[Mapping[str, Any]], model: str) -> None:
    lines = []
    for (target, rule), found in groupby(
        sorted(rows, key=lambda row: (row["target"], row["rule"], row["cached_tokens"])),
        key=lambda row: (row["target"], row["rule"]),
    ):
        line = [(row["cached_tokens"], row["kv_tokens_read"]) for row in found]
        colour, style, _ = _rule_style(rule)
        axes.plot(*zip(*line, strict=True), style, color=colour, linewidth=2.4, markersize=6)
        lines.append((line[-1], f" {target} {rule}", colour))
    top = max(row["kv_tokens_read"] for row in rows)
    heights = _apart([end[1] for end, _, _ in lines], gap=0.07 * top)
    for ((length, _), label, colour), height in zip(lines, heights, strict=True):
        axes.text(length, height, label, va="center", color=colour, fontweight="bold")
    axes.set_xlim(0, 1.5 * max(row["cached_tokens"] for row in rows))
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"KV tokens that a step reads for a tail,\nmean over layers, {model}")


def _rule_style(rule: str) -> tuple[str, str, int]:
    """Colour, line format, and the shift in tokens that keeps the rules' intervals apart."""
    return (ALWAYS, "o--", -90) if rule == "published" else (CHOSEN, "o-", 90)


def _label_lengths(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    ticks = range(0, max(row["cached_tokens"] for row in rows) + 1024, 2048)
    axes.set_xticks(ticks, [f"{tick // 1024}K" if tick else "0" for tick in ticks])
    axes.grid(axis="y")


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved up where one is less than `gap` above the next lower one."""
    moved = list(heights)
    below = float("-inf")
    for index in sorted(range(len(moved)), key=moved.__getitem__):
        below = moved[index] = max(moved[index], below + gap)
    return moved


def kept_pages(scores: Sequence[float], kept: int) -> list[int]:
    """Indices of the pages that a step reads: the first, the last two, and the best between.

    `scores` holds the scores of the pages between; `kept` counts all pages that are read. Of equal
    scores, the lower index wins.
    """
    between = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    last = len(scores) + 2
    return sorted([0, *(index + 1 for index in between[: kept - 3]), last - 1, last])


def draw_pages(schedule: BudgetSchedule, theme: Theme) -> Any:
    """Above, the pages that one KV head reads in a step; below, KV read and KV cached by length."""
    figure, axes = _figure(theme, 6.2, 5.4)
    axes.set_axis_off()
    axes.set(xlim=(0, 100), ylim=(-1, 87))
    _draw_selection(axes, theme)
    _draw_budgets(axes, schedule, theme)
    return figure


def _draw_selection(axes: Any, theme: Theme) -> None:
    count, kept = len(SCORES) + 3, set(kept_pages(SCORES, KEPT))
    width = 100 / count
    axes.text(0, 83, f"One step, one KV head: {KEPT} of {count} pages read", fontweight="bold")
    for page in range(count):
        always = page in (0, count - 2, count - 1)
        colour = ALWAYS if always else CHOSEN if page in kept else theme["fill"]
        _box(axes, page * width, 50, 0.8 * width, 7, colour, theme)
        if not always:
            height = 16 * SCORES[page - 1]
            _box(axes, page * width, 60, 0.8 * width, height, colour, theme)
    axes.text(0, 80, "score of a page: query · mean of its keys", va="top")
    axes.text(0, 45.5, "always read: first, last two", color=ALWAYS, va="center")
    axes.text(100, 45.5, "best scores", color=CHOSEN, va="center", ha="right")


def _draw_budgets(axes: Any, schedule: BudgetSchedule, theme: Theme) -> None:
    axes.text(0, 34, f"KV read of KV cached, schedule {schedule.name}", fontweight="bold")
    for row, length in enumerate(LENGTHS):
        read = int(schedule.tokens_read(length))
        bottom, scale = 24 - 8 * row, 56 / max(LENGTHS)
        axes.text(0, bottom + 2.5, f"{length // 1024}K", va="center")
        _box(axes, 9, bottom, length * scale, 5, theme["fill"], theme)
        _box(axes, 9, bottom, read * scale, 5, CHOSEN, theme)
        label = f"{read:,} ({read / length:.1%})"
        axes.text(11 + length * scale, bottom + 2.5, label, va="center")


def _box(
    axes: Any, left: float, bottom: float, width: float, height: float, colour: str, theme: Theme
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((left, bottom), width, height, facecolor=colour, edgecolor=theme["rule"])
    )


def _figure(theme: Theme, width: float, height: float, panels: Any = None) -> tuple[Any, Any]:
    """A figure and its axes; with `panels`, the axes are a mapping from panel names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots() if panels is None else figure.subplot_mosaic(panels)


def render(draw: Callable[[Theme], Any], theme: Theme, description: str) -> str:
    """SVG of a figure in the colours of `theme`, without a background; equal calls give equal SVG.

    `description` goes into the SVG's metadata and lists the data that is drawn, so that it is the
    same whichever matplotlib version draws the figure.
    """
    import matplotlib

    style: Any = {
        # Draw text as outlines, so that a page needs none of the fonts.
        "svg.fonttype": "path",
        "svg.hashsalt": "sparrow",
        "font.size": 14,
        "axes.titlesize": 14,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.edgecolor": theme["rule"],
        "grid.color": theme["rule"],
        "axes.labelcolor": theme["ink"],
        "axes.titlecolor": theme["ink"],
        "text.color": theme["ink"],
        "xtick.labelcolor": theme["ink"],
        "ytick.labelcolor": theme["ink"],
        "xtick.color": theme["rule"],
        "ytick.color": theme["rule"],
    }
    buffer = io.StringIO()
    with matplotlib.rc_context(style):
        draw(theme).savefig(
            buffer, format="svg", metadata={"Date": None, "Description": description}
        )
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def figures(root: Path = ROOT) -> dict[str, str]:
    """File name of each figure in each theme, and its SVG, from what `root` holds.

    Raises:
        ReportError: no result of a decode step can be drawn.
    """
    device, points = fullest_device(load_runs(root, "step_ms"))
    if not points:
        raise ReportError(f"{root}: no decode step of batch {BATCH} with its dense side")
    schedule = load_schedule(f"{points[0].model}-{TARGET}", PAGE_SIZE)
    steps = [
        f"{point.model} {point.context} {point.pair.dense['backend']}"
        f" {point.pair.dense['step_ms']:.2f} {point.pair.sparse['step_ms']:.2f}"
        for point in points
        if point.pair.dense
    ]
    read = [f"{length} {schedule.tokens_read(length)}" for length in LENGTHS]
    draws: dict[str, tuple[Callable[[Theme], Any], list[str]]] = {
        "speedup": (lambda theme: draw_speedup(points, device, theme), [device, *steps]),
        "kept-pages": (lambda theme: draw_pages(schedule, theme), [schedule.name, *read]),
    }
    for run in load_runs(root, "kv_tokens_read"):
        drawn = [
            f"{row['rule']} {row['target']} {row['kv_tokens_read']:.0f}"
            f" {row['samples']['tail']} {row['text']['tail']}"
            for row in run.rows
        ]
        name = f"rules-{run.content['model']}"
        draws[name] = (partial(draw_rules, run), [run.device, *drawn])
    return {
        f"{name}-{kind}.svg": render(draw, theme, "; ".join(drawn))
        for name, (draw, drawn) in draws.items()
        for kind, theme in (("light", LIGHT), ("dark", DARK))
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures of this checkout."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Draw the figures of README.md.")
    parser.parse_args(argv)
    folder = ROOT / FIGURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, svg in figures().items():
            (folder / name).write_text(svg, encoding="utf-8")
    except (ReportError, OSError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
