"""Charts as SVG inside a page: text stays text, colours follow the page's theme.

In: a `Chart` of lines or a `HeatMap`, numbers with names. Out: one `<svg>` element, drawn by
matplotlib. All charts have one width, at which their text can be read on a phone.
"""

import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

# Of medium lightness, so that they can be told from both black and white.
PALETTE = (
    "#3f7fce", "#c4691c", "#2f8f6b", "#8a63c9", "#c9504f", "#2389a3", "#a07a14", "#7b8087",
)  # fmt: skip
_RAMP = ("#8a63c9", "#3f7fce", "#2389a3", "#2f8f6b", "#a07a14", "#c4691c", "#c9504f")
# Slightly tinted, so that no cell has one of the two colours that `_inline` replaces by the theme.
_SHADES = ("#232830", "#6f7785", "#b4bac6", "#e9ebf0")
_INK, _RULE = "#101010", "#dddddd"
_THEME = {_INK: "currentColor", _RULE: "var(--rule)"}

_WIDTH_INCHES, _HEIGHT_INCHES, _LEGEND_ROW_INCHES = 4.5, 2.8, 0.2
_LEGEND_CHARACTERS = 60
_MARKED_POINTS = 40
_HEAT_HEIGHT_INCHES = 3.4
_MOST_ROW_LABELS = 9
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


@dataclass(frozen=True)
class Line:
    """`y` against `x`, both [N]; with `stairs`, `x` are the N + 1 edges of N levels.

    `low` and `high` [N] are the ends of a band. NaN leaves a gap.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    stairs: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes. `targets` are levels to hold, `moments` positions on the x axis.

    `stacked` draws the lines as stacked areas; `from_zero` begins the y axis at 0, `top` is its
    upper end.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    targets: Sequence[tuple[str, float]] = ()
    moments: Sequence[float] = ()
    stacked: bool = False
    from_zero: bool = False
    top: float | None = None

    @property
    def labels(self) -> list[str]:
        """Entries of the legend, which is drawn if there is more than one."""
        return [line.label for line in self.lines] + [label for label, _ in self.targets]


@dataclass(frozen=True)
class HeatMap:
    """`values` [rows, N] over N intervals with the N + 1 `edges`; NaN leaves a cell empty.

    `paths` are drawn over it: a label and, for each interval, the row that it goes through, NaN for
    none.
    """

    title: str
    x_label: str
    y_label: str
    value_label: str
    edges: Sequence[float]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    paths: Sequence[tuple[str, Sequence[float]]] = ()

    @property
    def labels(self) -> list[str]:
        """Entries of the legend."""
        return [label for label, _ in self.paths]


def ramp(count: int) -> list[str]:
    """`count` graded colours for lines that have an order."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    colours = LinearSegmentedColormap.from_list("ramp", _RAMP)
    return [to_hex(colours(i / max(1, count - 1))) for i in range(count)]


def draw(chart: Chart | HeatMap, name: str) -> str:
    """The chart as an `<svg>` element. `name` makes its ids differ from other charts' of a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = chart.labels
    longest = max((len(label) for label in labels), default=0)
    columns = max(1, min(6, _LEGEND_CHARACTERS // (longest + 7)))
    is_map = isinstance(chart, HeatMap)
    legend_rows = -(-len(labels) // columns) if len(labels) > 1 or is_map else 0
    height = _HEAT_HEIGHT_INCHES if is_map else _HEIGHT_INCHES
    text = io.StringIO()
    with rc_context(_STYLE | {"svg.hashsalt": name}):
        size = (_WIDTH_INCHES, height + legend_rows * _LEGEND_ROW_INCHES)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        if isinstance(chart, HeatMap):
            _colour(figure, axes, chart)
        else:
            _plot(axes, chart)
        if legend_rows:
            handles, shown = axes.get_legend_handles_labels()
            figure.legend(handles, shown, loc="outside lower center", ncols=columns)
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _inline(text.getvalue(), chart, name)


def _colour(figure: Any, axes: Any, chart: HeatMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    count = len(chart.rows)
    levels = np.arange(count + 1) - 0.5
    shades = LinearSegmentedColormap.from_list("shades", _SHADES)
    values = np.array(chart.values, np.float64)
    mesh = axes.pcolormesh(chart.edges, levels, values, cmap=shades)
    mesh.set_gid("cells")
    bar = figure.colorbar(mesh, ax=axes, label=chart.value_label, ticks=MaxNLocator(5))
    bar.outline.set_visible(False)
    # By default matplotlib makes the colour bar an image, which the page would have to load.
    bar.solids.set_rasterized(False)
    bar.solids.set_edgecolor("face")
    for i, (label, path) in enumerate(chart.paths):
        axes.stairs(path, chart.edges, baseline=None, label=label).set(
            gid=f"series-{i}", color=PALETTE[i % len(PALETTE)], linewidth=2.4
        )
    every = -(-count // _MOST_ROW_LABELS)
    axes.set_yticks(range(0, count, every), chart.rows[::every])
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=False)


def _plot(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if chart.stacked:
        areas = axes.stackplot(
            chart.lines[0].x,
            [line.y for line in chart.lines],
            labels=[line.label for line in chart.lines],
            colors=[line.colour for line in chart.lines],
            alpha=0.85,
        )
        for i, area in enumerate(areas):
            area.set_gid(f"series-{i}")
    else:
        for i, line in enumerate(chart.lines):
            _plot_line(axes, line, f"series-{i}")
    styles = itertools.cycle(("--", ":", "-."))
    for i, ((label, level), style) in enumerate(zip(chart.targets, styles, strict=False)):
        line = axes.axhline(level, color=_INK, linewidth=1.1, linestyle=style, label=label)
        line.set_gid(f"target-{i}")
    for i, moment in enumerate(chart.moments):
        axes.axvline(moment, color=_INK, linewidth=0.9, linestyle=":", gid=f"moment-{i}")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if all(float(x).is_integer() for line in chart.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.top is not None:
        axes.set_ylim(top=chart.top)


def _plot_line(axes: Any, line: Line, gid: str) -> None:
    style = "--" if line.dashed else "-"
    if line.stairs:
        shape = axes.stairs(line.y, line.x, baseline=None, label=line.label, color=line.colour)
        shape.set(gid=gid, linestyle=style, linewidth=_STYLE["lines.linewidth"])
        return
    marker = "o" if len(line.x) <= _MARKED_POINTS and not line.dashed else None
    axes.plot(line.x, line.y, style, marker=marker, color=line.colour, label=line.label, gid=gid)
    if line.low is not None and line.high is not None:
        low, high = (np.asarray(ends, np.float64) for ends in (line.low, line.high))
        axes.fill_between(line.x, low, high, color=line.colour, alpha=0.16, linewidth=0)


def _inline(svg: str, chart: Chart | HeatMap, name: str) -> str:
    """matplotlib's document as an element of the page: unique ids, theme colours, a title."""
    # Drop matplotlib's style rule: it would apply to the whole page, which has the same rule.
    body = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", svg, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body).replace("xlink:href", "href")
    for colour, theme in _THEME.items():
        body = body.replace(colour, theme)
    _, opening, body = re.split(r"(<svg\b[^>]*>)", body, maxsplit=1)
    box = re.findall(r'viewBox="([^"]*)"', opening)[0]
    head = Markup(
        '<svg class="chart" viewBox="{box}" role="img" aria-labelledby="{name}-title"'
        ' aria-describedby="{name}-desc"><title id="{name}-title">{title}</title>'
        '<desc id="{name}-desc">{y} against {x}. Lines: {lines}.</desc>'
    )
    names = {"title": chart.title, "x": chart.x_label, "y": chart.y_label}
    lines = ", ".join(chart.labels)
    return str(head.format(box=box, name=name, lines=lines, **names)) + body
