"""The page of everything that was found."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

from sparrow_sglang.report.page import Section, inline
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
