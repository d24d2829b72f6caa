"""The page of everything that was found; and the figure of a rollout: sequences still running
against seconds, by side."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from sparrow_sglang.report.page import INK, RULE, Section, drawing, inline, scale, series
from sparrow_sglang.report.sections import calibration_section, check_section, run_section
from sparrow_sglang.report.sources import ReportError, Row, Sources, reading


def write_page(title: str, sources: Sources) -> str:
    """The page about runs and calibrations; adds to `sources.left_out`. Raises `ReportError` if
    nothing can be shown."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    sections = list(_sections(sources))
    if not sections:
        raise ReportError(sources.left_out[0])
    environment = Environment(
        loader=PackageLoader("sparrow_sglang.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = inline
    return environment.get_template("page.html.j2").render(
        title=title, sections=sections, version=version("sparrow-sglang")
    )


def _sections(sources: Sources) -> Iterator[Section]:
    """The sections in reading order; adds what is damaged to `sources.left_out`."""
    together: dict[str, dict[Path, Row]] = {}
    for path, content in sources.schedules.items():
        evidence = content.get("provenance") or {}
        tails = evidence.get("tails", str(path))
        measured = json.dumps([content["bin_tokens"], evidence.get("settings"), tails])
        together.setdefault(measured, {})[path] = content
    calibrations = together.values()
    makers: list[tuple[Path, Callable[[], Section]]] = [
        *((folder, partial(run_section, folder)) for folder in sources.runs),
        *((min(rows), partial(calibration_section, [*rows.values()])) for rows in calibrations),
        *((path, partial(check_section, row)) for path, row in sources.checks.items()),
    ]
    for path, make in makers:
        try:
            with reading(path):
                yield make()
        except ReportError as error:
            sources.left_out.append(str(error))


# A page that shows the file as an image gives it no style, and may be white or black.
_ANYWHERE = {INK: "#7a828c", RULE: "#8b949e; stroke-opacity: 0.35"}


def rollout_figure(rows: Sequence[Row]) -> str:
    """An SVG file of rows that `sparrow bench rollout` writes, with their `device`: of the largest
    number of sequences the fastest side of stock SGLang, and each of sparrow, or NGRAM alone. Of
    several sets of prompts the first one is shown."""
    most = max(row["sequences"] for row in rows)
    rows = [row for row in rows if row["sequences"] == most]
    dense = [row for row in rows if not (row["schedule"] or row.get("side") == "ngram")]
    dense.sort(key=lambda row: -float(row["tokens_per_s"]))
    shown = [*dense[:1], *(row for row in rows if row["schedule"])] or rows
    longest, device = max(row["longest"] for row in shown), shown[0]["device"]
    title = f"{shown[0]['model']}, {most} sequences of up to {longest:,} tokens, {device}"
    with drawing(title, "seconds", "sequences still running", (7, 3)) as (axes, svg):
        axes.set_title(title, fontsize=10)
        for index, row in enumerate(shown):
            ends = np.sort(np.atleast_2d(row["finished_s"])[0])
            label = f"{_side(row)}, {ends[-1]:,.1f} s"
            running = np.arange(len(ends), -1, -1)
            axes.step([0, *ends], running, where="post", **series(index, label))
        scale(axes, from_zero=True)
        axes.set_xlim(left=0)
    text = svg.getvalue()
    for colour, anywhere in _ANYWHERE.items():
        text = text.replace(colour, anywhere)
    return text


def _side(row: Row) -> str:
    if not row["schedule"]:
        return f"stock SGLang ({row['backend']})"
    return "lossless" if row.get("drafts") else f"sparse ({row['schedule']})"
