"""`sparrow report`: one self-contained HTML page about a folder of results.

In: a folder, or one file, that other commands have written. Out: the page.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_text
from sparrow_sglang.report.benchmark import benchmark_sections
from sparrow_sglang.report.calibration import check_section, schedule_sections
from sparrow_sglang.report.learning import arms_section
from sparrow_sglang.report.page import ReportError, Section, render
from sparrow_sglang.report.sources import Sources, find_sources
from sparrow_sglang.report.training import training_section

_SUFFIXES = (".html", ".htm")
_EPILOG = """\
examples:
  sparrow report runs/math                        a training run
  sparrow report m-0.86.json --out m.html         one schedule with its evidence
  sparrow report benchmarks/results/h200          everything that was measured there

The page needs no network and no other file, and can be read on a phone.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `report` to the subparsers of `sparrow`; `run` handles what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="one HTML page from a calibration, benchmark or training run",
        description="Write one self-contained HTML page about the results in a folder. Training"
        " runs, calibrations,\nschedules and their checks, and benchmark results get a section"
        " each.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "place",
        type=Path,
        metavar="DIR",
        help="folder, which is searched with its subfolders, or a file",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="HTML file to write (default: %(default)s)",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the page and print its name. Raises `ReportError`."""
    out: Path = args.out
    if out.suffix.lower() not in _SUFFIXES:
        raise ReportError(f"--out {out}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    page, left_out = make_report(args.place)
    for reason in left_out:
        print(f"left out: {reason}")
    _write(out, page)
    print(out)
    return 0


def make_report(place: Path) -> tuple[str, list[str]]:
    """The page about `place`, and reasons why something in it is left out.

    Raises `ReportError` if there is nothing to report on.
    """
    sources = find_sources(place)
    sections = _sections(sources)
    if not sections:
        raise ReportError(sources.left_out[0])
    return render(f"Sparrow: {place.resolve().name}", sections, sources.left_out), sources.left_out


def _sections(sources: Sources) -> list[Section]:
    """Sections in reading order; reasons why damaged files are missing go to `sources.left_out`."""
    runs = (partial(training_section, folder) for folder in sources.runs)
    checks = (partial(check_section, path, content) for path, content in sources.checks.items())
    arms = (partial(arms_section, folder, files) for folder, files in sources.arms.items())
    sections = _built(runs, sources) + _built(arms, sources)
    sections += schedule_sections(sources.schedules, sources.left_out)
    sections += _built(checks, sources)
    return sections + benchmark_sections(sources.results, sources.left_out)


def _built(builders: Iterable[Callable[[], Section]], sources: Sources) -> list[Section]:
    sections = []
    for build in builders:
        try:
            sections.append(build())
        except ReportError as error:
            sources.left_out.append(str(error))
    return sections


def _write(out: Path, page: str) -> None:
    try:
        write_text(out, page)
    except OSError as error:
        raise ReportError(f"--out {out}: cannot be written ({error.strerror or error})") from None
