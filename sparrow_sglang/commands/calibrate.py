"""`sparrow calibrate`: the cheapest KV budget per position bin that holds a tail target, measured.

In: a model and prompts. Fresh generations under several fixed budgets are scored densely by the
same engine. Out: one schedule file per target with its evidence, and a plot; or, with --check, a
report on how fresh generations under given schedules hold their targets.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.calibration.choice import CalibrationError, bin_tails
from sparrow_sglang.calibration.engine import running_engine
from sparrow_sglang.calibration.job import (
    Job,
    default_bin_tokens,
    default_budgets,
    find_model,
    load_prompts,
    origin,
    settings_of,
)
from sparrow_sglang.calibration.measure import (
    fixed_arm,
    measure,
    schedule_arm,
    tokens_by_arm,
    units_of_work,
)
from sparrow_sglang.calibration.prompts import read_prompts
from sparrow_sglang.calibration.report import (
    check_schedule,
    describe,
    describe_misses,
    describe_tails,
    make_schedule,
    plot,
)
from sparrow_sglang.calibration.store import WorkFolder
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.config import schedule_from
from sparrow_sglang.json_values import cut
from sparrow_sglang.mismatch.tail import TAIL_PERCENTILE
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, path_problem
from sparrow_sglang.plugin.exact_acceptance import recording
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.progress import Progress
from sparrow_sglang.schedule import NAME, PAGE_SIZE, PAGE_SIZES, BudgetSchedule

DEFAULT_TARGET = 0.86

EPILOG = """\
examples:
  sparrow calibrate --target 0.75 0.86 0.92         the small model that comes along, three targets
  sparrow calibrate --model-path M --prompts prompts.jsonl --target 0.86 --out m-0.86.json
  sparrow calibrate --model-path M --check m-0.86.json      do fresh prompts and samples hold it?

A killed run goes on where it stopped when the command is repeated; another --target costs a second.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `calibrate` to the subparsers of `sparrow`; `run` handles what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate",
        help="measure the cheapest schedule of a model that holds a tail target",
        description="Generate under several fixed KV budgets, score densely, and choose per"
        " position bin the cheapest budget whose tail of the acceptance rate holds the target.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model-path",
        default=EMBEDDED_MODEL_NAME,
        help=f"folder or HF name; default: {EMBEDDED_MODEL_NAME}",
    )
    add("--prompts", type=Path, help="JSONL of prompt, messages or input_ids; default: built in")
    add("--target", type=float, nargs="+", help=f"tails to hold; default {DEFAULT_TARGET}")
    add("--out", type=Path, help="schedule file; with several targets, -TARGET goes before .json")
    add("--check", nargs="+", metavar="SCHEDULE", help="measure these schedule files instead")
    add("--work", type=Path, help="folder of measurements, to resume from; default: beside --out")
    add("--budgets", type=int, nargs="+", help="KV budgets in tokens; default: 128 to 12288")
    add("--page-size", type=int, choices=PAGE_SIZES, default=PAGE_SIZE, help="default 16")
    add("--bin-tokens", type=int, help="default about 2000; 1024 up to a context of 16384")
    add("--new-tokens", type=at_least(2), default=128, help="per generation, at most (default 128)")
    add("--samples", type=count, default=1, help="per prompt and budget (default 1)")
    add("--prompts-per-bin", type=count, default=24, help="of the built-in set (default 24)")
    add("--min-tokens", type=count, default=1000, help="for a bin to be judged (default 1000)")
    add("--batch", type=count, default=128, help="generations per saved batch (default 128)")
    add("--seed", type=int, default=0, help="of built-in prompts and sampling (default 0)")
    add("--engine-args", default="{}", help="JSON object of more arguments for sglang.Engine")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Calibrate or check; the exit code is 1 if a checked schedule does not hold its target.

    Raises `ValueError` (`CalibrationError`, `ScheduleError`) or `ModelError`.
    """
    for target in args.target or ():
        if not 0 < target < 1:
            raise CalibrationError(f"--target {target}: expected a tail between 0 and 1, e.g. 0.86")
    engine_args = engine_arguments(args.engine_args)
    _require_files(args)
    return _check(args, engine_args) if args.check else _calibrate(args, engine_args)


def _require_files(args: argparse.Namespace) -> None:
    """Refuse what is not there or has a wrong line, before torch and SGLang are imported."""
    if problem := path_problem(args.model_path):
        raise CalibrationError(f"--model-path {args.model_path}: {problem}")
    if args.prompts is not None:
        read_prompts(args.prompts, lambda text: [0], sys.maxsize)
    for path in args.check or ():
        BudgetSchedule.from_json(path)


def _calibrate(args: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    model, model_path, hf_config, context = find_model(args.model_path, engine_args)
    targets = args.target or [DEFAULT_TARGET]
    out = args.out or Path(f"{model}.json" if len(targets) > 1 else f"{model}-{targets[0]}.json")
    _require_names(_schedule_files(out, targets))
    bin_tokens = args.bin_tokens or default_bin_tokens(context, args.page_size)
    budgets = sorted(set(args.budgets or default_budgets(context, args.page_size)))
    arms = [fixed_arm(budget, args.page_size) for budget in budgets]
    if bin_tokens < 1 or bin_tokens % args.page_size:
        raise CalibrationError(
            f"--bin-tokens={bin_tokens}: expected a multiple of the page size {args.page_size}"
        )
    prompts = load_prompts(args, model_path, context, bin_tokens, "calibration")
    units = units_of_work(prompts, arms, args.samples, args.new_tokens, context)
    settings = settings_of(args, model_path, prompts, context) | {"budgets": budgets}
    folder = args.work or out.parent / f"{model}-page{args.page_size}.calibration"
    work = WorkFolder(folder, settings)
    job = Job(model, model_path, hf_config, context, args.page_size, prompts, units, work)
    whole = -(-context // args.page_size) * args.page_size
    _measure(job, args, engine_args, f"fixed-{whole}")
    _write_results(job, args, targets, bin_tokens, out, settings)
    return 0


def _schedule_files(out: Path, targets: Sequence[float]) -> list[Path]:
    """One file per target; each schedule is called what its file is called, without .json."""
    if len(targets) == 1:
        return [out]
    return [out.with_stem(f"{out.stem}-{target}") for target in targets]


def _require_names(files: Sequence[Path]) -> None:
    for path in files:
        if not NAME.fullmatch(path.stem):
            raise CalibrationError(
                f"--out {cut(str(path))}: expected a file name of 1 to 64 letters, digits, '.', '_'"
                " and '-' before .json, which becomes the name of the schedule"
            )


def _write_results(
    job: Job,
    args: argparse.Namespace,
    targets: Sequence[float],
    bin_tokens: int,
    out: Path,
    settings: dict[str, Any],
) -> None:
    """Schedule files and plot from the stored measurements, which takes a second.

    Raises `CalibrationError` after all has been written that could be, if a target is held nowhere.
    """
    found = tokens_by_arm(job.units, job.work)
    by_budget = {unit.arm.schedule.budget_tokens[0]: unit.arm.schedule.name for unit in job.units}
    size = (bin_tokens, job.page_size)
    tails = {budget: bin_tails(found[name], *size) for budget, name in by_budget.items()}
    evidence = origin(job) | {"settings": settings, "tails": _all_tails(tails)}
    print(
        f"measured: {TAIL_PERCENTILE:g}th percentile of the acceptance rate per bin and budget\n"
        f"{describe_tails(tails, targets, bin_tokens, args.min_tokens)}\n"
    )
    schedules, failures = [], []
    with _kept(job.work):
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, target in zip(_schedule_files(out, targets), targets, strict=True):
            for line in describe_misses(tails, target, bin_tokens, args.min_tokens):
                print(line)
            try:
                schedule = make_schedule(
                    path.stem,
                    target,
                    tails,
                    page_size=job.page_size,
                    bin_tokens=bin_tokens,
                    context=job.context,
                    min_tokens=args.min_tokens,
                    origin=evidence,
                )
            except CalibrationError as error:
                failures.append(str(error))
                continue
            schedule.save(path)
            schedules.append(schedule)
            print(f"{path} (target {target})\n{describe(schedule)}\n")
        picture = out.with_suffix(".png")
        title = f"{job.model}, page size {job.page_size}, {len(job.prompts)} prompts"
        plot(picture, tails, schedules, bin_tokens, args.min_tokens, title)
    print(picture)
    if failures:
        raise CalibrationError(
            f"{'; '.join(failures)}; the measurements are kept in {job.work.path}"
        )


def _check(args: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    model, model_path, hf_config, context = find_model(args.model_path, engine_args)
    schedules = [BudgetSchedule.from_json(path) for path in args.check]
    page_size = schedules[0].page_size
    names = [schedule.name for schedule in schedules]
    if len(set(names)) < len(names) or any(s.page_size != page_size for s in schedules):
        raise CalibrationError(
            f"--check: got the schedules {', '.join(names)} of page sizes"
            f" {sorted({s.page_size for s in schedules})}: expected different names and one page"
            " size; check them one after the other"
        )
    aims = [schedule.tail_target or (args.target or [None])[0] for schedule in schedules]
    if None in aims:
        raise CalibrationError(
            f"--check: {names[aims.index(None)]} has no tail_target: pass --target"
        )
    first = Path(args.check[0])
    out = args.out or first.with_suffix(".check.json")
    prompts = load_prompts(args, model_path, context, schedules[0].bin_tokens, "check")
    arms = [schedule_arm(schedule) for schedule in schedules]
    units = units_of_work(prompts, arms, args.samples, args.new_tokens, context)
    settings = settings_of(args, model_path, prompts, context) | {
        "schedules": [
            [s.name, s.bin_tokens, s.budget_tokens, s.sink_pages, s.recent_pages, s.dense_layers]
            for s in schedules
        ]
    }
    work = WorkFolder(args.work or first.with_suffix(".check"), settings)
    job = Job(model, model_path, hf_config, context, page_size, prompts, units, work)
    _measure(job, args, engine_args, ",".join(str(path) for path in args.check))
    found = tokens_by_arm(units, work)
    reports = [
        check_schedule(schedule, aim, found.get(schedule.name, []), args.min_tokens)
        for schedule, aim in zip(schedules, aims, strict=True)
    ]
    with _kept(work):
        write_json(out, {"checks": reports, **origin(job), "settings": settings})
    for report in reports:
        counts = ", ".join(f"{row['bin']}: {row['verdict']}" for row in report["bins"])
        print(f"{report['schedule']}: {'holds' if report['holds'] else 'does not hold'} ({counts})")
    print(out)
    return 0 if all(report["holds"] for report in reports) else 1


def _measure(
    job: Job, args: argparse.Namespace, engine_args: dict[str, Any], schedule: str
) -> None:
    """Measure what the work folder lacks; starts no engine if that is nothing."""
    if not job.units:
        raise CalibrationError(
            "no generation would decode sparsely: the budgets hold every prompt with its new"
            " tokens; expected longer prompts, more --new-tokens or smaller --budgets"
        )
    if len(job.work.load()) == len(job.units):
        return
    defaults = {
        "context_length": job.context,
        "page_size": job.page_size,
        "random_seed": args.seed,
        "sparrow_schedule": schedule,
    }
    with (
        recording(args.batch, args.new_tokens),
        schedule_from("sparrow calibrate, whose requests ask for their own"),
        closing(Progress(len(job.units), "generation")) as progress,
    ):
        progress.show("starting the engine")
        with running_engine(job.model_path, defaults | engine_args) as engine:
            measure(engine, job.units, job.work, args.batch, progress)


def _all_tails(tails: dict[int, Any]) -> dict[str, Any]:
    """Every curve of the plot: budget -> bins with tail, interval and token count."""
    return {
        str(budget): [
            {
                "bin": t.bin,
                "tokens": t.tokens,
                "tail": t.tail,
                "low": t.tail_low,
                "high": t.tail_high,
            }
            for t in bins.values()
        ]
        for budget, bins in sorted(tails.items())
    }


@contextmanager
def _kept(work: WorkFolder) -> Iterator[None]:
    """Turn a failed write of results into an error that says that the measurements are kept."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot write {error.filename or 'the results'} ({error.strerror or error}); the"
            f" measurements are kept in {work.path}: make room and repeat the command"
        ) from None
