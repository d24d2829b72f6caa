"""The parts of a page, which loads no other files: its charts are inline SVG, whose text and
colours follow its theme."""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparrow_sglang.report.sources import Row

POSITION_LABEL = "position (cached tokens)"
# Of medium lightness, to be seen on both black and white.
PALETTE = ("#3f7fce", "#c4691c", "#2f8f6b", "#8a63c9", "#c9504f", "#2389a3", "#a07a14", "#7b8087")
INK, RULE = "#101010", "#dddddd"
_THEME = {INK: "currentColor", RULE: "var(--rule)"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


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
        # At this width the text can be read on a phone.
        with drawing(title, x_label, y_label, (4.5, 2.8)) as (axes, svg):
            yield axes
        self.charts.append(Chart(title, svg.getvalue(), note))


@contextmanager
def drawing(
    title: str, x_label: str, y_label: str, inches: tuple[float, float]
) -> Iterator[tuple[Any, io.StringIO]]:
    """Axes for the block to plot on, and what receives the SVG at its end. The legend of several
    series adds to the height."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    svg = io.StringIO()
    with rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=x_label, ylabel=y_label, axisbelow=True)
        yield axes, svg
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = max(1, min(6, int(13.4 * inches[0]) // (max(map(len, labels)) + 7)))
            figure.set_figheight(inches[1] + 0.2 * -(-len(labels) // columns))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        figure.savefig(svg, format="svg", metadata={"Date": None})


def scale(axes: Any, whole: bool = False, from_zero: bool = False) -> None:
    """Few ticks with readable numbers, at whole positions if `whole`."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    if from_zero:
        axes.set_ylim(bottom=0)


def draw_level(axes: Any, name: str, level: float) -> None:
    label = f"{name} {level:,g}"
    axes.axhline(level, color=INK, linewidth=1.1, linestyle="--", label=label, gid="level")


def series(index: int, label: str) -> dict[str, Any]:
    return {"color": PALETTE[index % len(PALETTE)], "label": label, "gid": f"series-{index}"}


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


def versions(fields: Row) -> dict[str, str]:
    packages = {name: each for name, each in fields.get("packages", {}).items() if each}
    names = ("date", "device", "python", "commit", "command")
    return flat({name: fields[name] for name in names if name in fields} | packages)


def inline(chart: Chart, name: str) -> Any:
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
