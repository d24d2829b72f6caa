"""`sparrow calibrate`: measure the cheapest KV budget per position bin that holds a tail target.

In: a model and prompts. Fresh generations under several fixed budgets are scored densely by the
same engine. Out: one schedule file per target with its evidence, and a plot; or, with --check, a
report on how fresh generations under given schedules hold their targets.
"""

import argparse
from pathlib import Path
from typing import Any

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.engine import measure_missing
from sparrow_sglang.calibration.job import (
    DEFAULT_TARGET,
    PUBLISHED,
    RULES,
    calibration_job,
    check_job,
    require_files,
)
from sparrow_sglang.calibration.report import write_check, write_schedules
from sparrow_sglang.calibration.rule import describe_rule
from sparrow_sglang.calibration.rule_job import with_chosen_rule
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.models import EMBEDDED_MODEL_NAME
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import PAGE_SIZE, PAGE_SIZES

EPILOG = """\
examples:
  sparrow calibrate --target 0.75 0.86 0.92         the small embedded model, three targets
  sparrow calibrate --model-path M --prompts prompts.jsonl --target 0.86 --out m-0.86.json
  sparrow calibrate --rule calibrated --target 0.86         page selection measured for the model
  sparrow calibrate --model-path M --check m-0.86.json      does it hold on fresh samples?

A killed run resumes where it stopped when the command is repeated. Another --target takes a second,
because the measurements are used again.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `calibrate` to the subparsers of `sparrow`; `run` handles what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate",
        help="measure the cheapest schedule of a model that holds a tail target",
        description="Generate responses under several fixed KV budgets, score them densely, and"
        " choose for each bin\nof positions the cheapest budget whose tail percentile of the"
        " acceptance rate reaches the target.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model-path",
        default=EMBEDDED_MODEL_NAME,
        help=f"folder or Hugging Face name; default: {EMBEDDED_MODEL_NAME}",
    )
    add(
        "--prompts",
        type=Path,
        help="JSONL file of prompts, each with prompt, messages or input_ids; default: built in",
    )
    add(
        "--target",
        type=float,
        nargs="+",
        help="tail percentiles of the acceptance rate to reach, one schedule each; default"
        f" {DEFAULT_TARGET}",
    )
    add(
        "--out",
        type=Path,
        help="schedule file to write; with several targets, -TARGET goes before .json",
    )
    add(
        "--check",
        nargs="+",
        metavar="SCHEDULE",
        help="do not calibrate, but measure whether these schedule files hold their targets",
    )
    add(
        "--work",
        type=Path,
        help="folder for measurements, from which a run resumes; default: beside --out",
    )
    add(
        "--budgets",
        type=int,
        nargs="+",
        help="KV budgets to measure, in tokens; default: 128 to 12288",
    )
    add(
        "--rule",
        choices=RULES,
        default=PUBLISHED,
        help="how pages are selected. published (default): as in the paper, with the same budget"
        " in each layer. calibrated: with rotary pairs of int4 landmarks, layer budgets and dense"
        " layers that are measured for the model",
    )
    add(
        "--page-size",
        type=int,
        choices=PAGE_SIZES,
        default=PAGE_SIZE,
        help="tokens per page (default 16)",
    )
    add(
        "--bin-tokens",
        type=int,
        help="positions per bin; default about 2000, or 1024 up to a context of 16384",
    )
    add(
        "--new-tokens",
        type=at_least(2),
        default=128,
        help="most new tokens per generation (default 128)",
    )
    add("--samples", type=count, default=1, help="generations per prompt and budget (default 1)")
    add(
        "--prompts-per-bin",
        type=count,
        default=24,
        help="built-in prompts per bin (default 24)",
    )
    add(
        "--min-tokens",
        type=count,
        default=1000,
        help="measured tokens that a bin needs to be judged (default 1000)",
    )
    add("--batch", type=count, default=128, help="generations per saved batch (default 128)")
    add("--seed", type=int, default=0, help="seed of built-in prompts and of sampling (default 0)")
    add("--engine-args", default="{}", help="further arguments of sglang.Engine, a JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Calibrate or check; the exit code is 1 if a checked schedule does not hold its target.

    Raises `ValueError` (`CalibrationError`, `ScheduleError`) or `ModelError`.
    """
    for target in args.target or ():
        if not 0 < target < 1:
            raise CalibrationError(f"--target {target}: expected a tail between 0 and 1, e.g. 0.86")
    _require_no_choice_in_a_check(args)
    require_files(args)
    args.engine_args = engine_arguments(args.engine_args)
    job = check_job(args) if args.check else calibration_job(args)
    if args.rule != PUBLISHED:
        job = with_chosen_rule(job)
        assert job.rule is not None
        print(f"{describe_rule(job.rule)}\n")
    measure_missing(job)
    if not args.check:
        for line in write_schedules(job):
            print(line)
        return 0
    reports = write_check(job)
    for report in reports:
        counts = ", ".join(f"{row['bin']}: {row['verdict']}" for row in report["bins"])
        verdict = "holds" if report["holds"] else "does not hold"
        print(f"{report['schedule']}: {verdict} {report['target']:g} ({counts})")
    print(job.out)
    return 0 if all(report["holds"] for report in reports) else 1


def _require_no_choice_in_a_check(args: argparse.Namespace) -> None:
    """Refuse options with --check that the checked schedule already determines."""
    chosen = {
        "rule": None if args.rule == PUBLISHED else [args.rule],
        "budgets": args.budgets,
        "bin-tokens": None if args.bin_tokens is None else [args.bin_tokens],
    }
    for name, values in chosen.items():
        if args.check and values is not None:
            raise CalibrationError(
                f"--{name} {' '.join(map(str, values))} has no meaning with --check, which"
                " generates under each schedule as its file says: leave it out"
            )
