"""`sparrow report`: a page about a training run or a calibration, several runs compared, results of
`sparrow bench step` as a table, or one of `sparrow bench rollout` as a figure."""

import argparse
import json
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_text
from sparrow_sglang.benchmarks.step import steps_table
from sparrow_sglang.command_line import new_path
from sparrow_sglang.report.compare import compare, comparison_table
from sparrow_sglang.report.rollout_figure import rollout_figure
from sparrow_sglang.report.sources import ReportError, find_sources, reading
from sparrow_sglang.report.write import write_page

DESCRIPTION = """\
Write an HTML page about a training run or a calibration, print a table of several runs
or of measured steps, or draw a rollout. Runs that differ in the seed only are one arm.
"""

EPILOG = """\
examples:
  sparrow report runs/math                        report.html, a page about a training run
  sparrow report m-0.86.json --out m.html         one schedule with its evidence
  sparrow report runs/sparse-0 runs/sparse-1 runs/dense-0 runs/dense-1 --out runs.json
                                                  several runs, compared by their settings, with
                                                  intervals over the seeds of equal settings
  sparrow report steps-8b.json                    steps of `sparrow bench step`, and what lossless
                                                  decoding gains at several acceptance rates
  sparrow report rollout.json --out rollout.svg   sequences still running, by second and side

A page needs no network and no other file, and can be read on a phone.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    paths = "files, or folders, which are searched with their subfolders"
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=paths)
    out = (
        "the .html file to write (default report.html); for several runs, a .json file of their"
        " numbers (default: none); for a rollout, an .svg file (default rollout.svg)"
    )
    parser.add_argument("--out", type=new_path, help=out)


def run(args: argparse.Namespace) -> int:
    """Write the page or figure, or print a table of several runs or steps. Raises `ReportError`."""
    steps = [_bench_rows(path, "step_ms") for path in args.paths]
    out: Path | None = args.out
    if all(steps):
        if out:
            raise ReportError(f"--out {out}: steps are a table in the terminal; expected no --out")
        with reading(", ".join(map(str, args.paths))):
            print(steps_table([row for rows in steps for row in rows]))
        return 0
    if len(args.paths) == 1 and (rows := _bench_rows(args.paths[0], "finished_s")):
        out = out or Path("rollout.svg")
        _require_suffix(out, ".svg", "a figure of a rollout")
        with reading(args.paths[0]):
            write_text(out, rollout_figure(rows))
        print(out)
        return 0
    sources = find_sources(args.paths)
    if len(sources.runs) > 1:
        _require_suffix(out, ".json", f"{len(sources.runs)} runs are compared in the terminal")
        comparison = compare(sources)
        sources.left_out += map(str, [*sources.schedules, *sources.checks])
        text = json.dumps(comparison, indent=1, ensure_ascii=False)
        print(comparison_table(comparison))
    else:
        out = out or Path("report.html")
        _require_suffix(out, ".html", "a page")
        more = f" and {len(args.paths) - 1} more" if args.paths[1:] else ""
        text = write_page(f"Sparrow: {args.paths[0].resolve().name}{more}", sources)
    for reason in sources.left_out:
        print(f"left out: {reason}")
    if out is not None:
        write_text(out, text)
        print(out)
    return 0


def _bench_rows(path: Path, measured: str) -> list[dict[str, Any]]:
    """Rows of a result of `sparrow bench` that have the field `measured`, each with its `file` and
    `device`; empty for other files."""
    try:
        content = json.loads(path.read_text("utf-8"))
        origin = {"file": path, "device": content.get("device")}
        return [row | origin for row in content["rows"] if measured in row]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _require_suffix(out: Path | None, suffix: str, what: str) -> None:
    if out is not None and out.suffix.lower() != suffix:
        raise ReportError(f"--out {out}: {what}; expected a name that ends in {suffix}")
