"""The page: sections with facts, charts, tables and settings, rendered as one HTML string.

In: `Section`s. Out: HTML that loads no other files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.report.charts import Chart, HeatMap, draw


class ReportError(InputError):
    """Something cannot be reported on; the message names the file and what is expected."""


@contextmanager
def reading(path: Path | str, writer: str) -> Iterator[None]:
    """Turn errors that a damaged file causes in the block into a `ReportError` that names it."""
    try:
        yield
    except ReportError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ReportError(f"{path}: {reason}; expected what `{writer}` writes") from None


@dataclass(frozen=True)
class Table:
    """Cells as text; the first `words` columns are words, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True)
class Figure:
    """A chart with a sentence below it."""

    chart: Chart | HeatMap
    note: str = ""


@dataclass(frozen=True)
class Settings:
    """Names and values, such as a configuration, shown as they were written."""

    title: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Excerpt:
    """A text as it was written, such as a response."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """The section of one calibration, run or set of results. `facts` are names and values."""

    kind: str
    title: str
    facts: Sequence[tuple[str, str]]
    figures: Sequence[Figure]
    tables: Sequence[Table] = ()
    settings: Sequence[Settings] = ()
    excerpts: Sequence[Excerpt] = ()


def render(title: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """The page. `left_out` are the reasons why some files that were found are not on it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("sparrow_sglang.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["draw"] = lambda chart, name: Markup(draw(chart, name))
    page: str = environment.get_template("page.html.j2").render(
        title=title, sections=sections, left_out=left_out, version=version("sparrow-sglang")
    )
    return page


def number(value: float | None, digits: int = 4) -> str:
    """A number for readers: whole numbers whole, others to `digits` significant digits."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings under dotted names."""
    named: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            named |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            named[prefix + key] = ", ".join(map(str, value)) or "none"
        else:
            named[prefix + key] = "none" if value is None else str(value)
    return named


def provenance(fields: Mapping[str, Any]) -> dict[str, str]:
    """Device, versions, commit, command and date that a result file carries."""
    packages = fields.get("packages", {})
    kept = {key: fields[key] for key in ("date", "device", "python") if key in fields}
    kept |= {name: found for name, found in packages.items() if found}
    kept |= {key: fields[key] for key in ("commit", "command") if key in fields}
    return flat(kept)
