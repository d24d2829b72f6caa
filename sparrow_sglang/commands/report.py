"""`sparrow report`: one self-contained HTML page about training runs and calibrations.

In: folders, or files, that other commands have written. Out: the page, or a comparison's numbers.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_text
from sparrow_sglang.report.calibration import check_section, schedule_sections
from sparrow_sglang.report.comparison import comparison_data, comparison_section, runs_of
from sparrow_sglang.report.page import ReportError, Section, render
from sparrow_sglang.report.sources import Sources, find_sources
from sparrow_sglang.report.training_run import training_section

_SUFFIXES = (".html", ".htm", ".json")
# More runs are compared, but have no sections of their own.
_MOST_RUNS = 6
_EPILOG = """\
examples:
  sparrow report runs/math                        a training run
  sparrow report runs/sparse-0 runs/sparse-1 runs/dense-0 runs/dense-1
                                                  several runs, compared by their settings, with
                                                  intervals over the seeds of equal settings
  sparrow report m-0.86.json --out m.html         one schedule with its evidence
  sparrow report runs --out runs.json             the numbers of the comparison alone

The page needs no network and no other file, and can be read on a phone.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `report` to the subparsers of `sparrow`; `run` handles what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        description="Write one self-contained HTML page about training runs, calibrations,"
        " schedules and their checks.\nSeveral runs are compared: runs whose settings differ in no"
        " more than the seed are one arm.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "places",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folders, which are searched with their subfolders, or files",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="HTML file to write, or .json for the numbers of several runs (default: %(default)s)",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the page and print its name. Raises `ReportError`."""
    out: Path = args.out
    if out.suffix.lower() not in _SUFFIXES:
        raise ReportError(f"--out {out}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    if out.suffix.lower() == ".json":
        page, left_out = compared_numbers(args.places)
    else:
        page, left_out = make_report(args.places)
    for reason in left_out:
        print(f"left out: {reason}")
    _write(out, page)
    print(out)
    return 0


def compared_numbers(places: Sequence[Path]) -> tuple[str, list[str]]:
    """The comparison of the runs in `places` as JSON, and reasons why some are left out.

    Raises `ReportError` if there are not several runs.
    """
    sources = find_sources(places)
    runs = runs_of(sources.runs, sources.left_out)
    if len(runs) < 2:
        raise ReportError(f"--out for numbers compares runs: expected two or more, got {len(runs)}")
    return json.dumps(comparison_data(runs), indent=1, ensure_ascii=False), sources.left_out


def make_report(places: Sequence[Path]) -> tuple[str, list[str]]:
    """The page about `places`, and reasons why something in them is left out.

    Raises `ReportError` if there is nothing to report on, or a package is missing.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(
            f"{error.name} is not installed: pip install 'sparrow-sglang[report]'"
        ) from None
    sources = find_sources(places)
    sections = _sections(sources)
    if not sections:
        raise ReportError(sources.left_out[0])
    title = f"Sparrow: {', '.join(place.resolve().name for place in places)}"
    return render(title, sections, sources.left_out), sources.left_out


def _sections(sources: Sources) -> list[Section]:
    """Sections in reading order; reasons why damaged files are missing go to `sources.left_out`."""
    runs = sources.runs
    builders: list[Callable[[], Section]] = []
    compared = runs_of(runs, sources.left_out) if len(runs) > 1 else []
    if len(compared) > 1:
        builders.append(partial(comparison_section, compared, f"{len(compared)} runs compared"))
    if len(runs) <= _MOST_RUNS:
        builders += [partial(training_section, folder) for folder in runs]
    sections = _built(builders, sources)
    sections += schedule_sections(sources.schedules, sources.left_out)
    checks = (partial(check_section, path, content) for path, content in sources.checks.items())
    return sections + _built(checks, sources)


def _built(builders: Iterable[Callable[[], Section]], sources: Sources) -> list[Section]:
    sections = []
    for build in builders:
        try:
            sections.append(build())
        except ReportError as error:
            if str(error) not in sources.left_out:
                sources.left_out.append(str(error))
    return sections


def _write(out: Path, page: str) -> None:
    try:
        write_text(out, page)
    except OSError as error:
        raise ReportError(f"--out {out}: cannot be written ({error.strerror or error})") from None
