"""`sparrow calibrate`: measure the cheapest KV budget per position bin that holds a tail target."""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.job import (
    DEFAULT_TARGET,
    PROMPTS_PER_BIN,
    RESERVED,
    CalibrationOptions,
    Job,
    calibration_job,
    check_job,
)
from sparrow_sglang.calibration.measure import measure_missing
from sparrow_sglang.calibration.results import describe_check, write_check, write_schedules
from sparrow_sglang.command_line import at_least, count, new_path, rate
from sparrow_sglang.mismatch.tail import MIN_CLUSTERS, bins_of_lengths
from sparrow_sglang.models import require_reachable
from sparrow_sglang.plugin.arguments.server_args import engine_arguments
from sparrow_sglang.processes import exit_on_sigterm
from sparrow_sglang.schedules.schedule import PAGE_SIZE, PAGE_SIZES, RULES

DESCRIPTION = """\
Generate responses under several fixed KV budgets, score them densely, and choose for each bin
of positions the cheapest budget whose tail percentile of the acceptance rate reaches the target.
"""

EPILOG = """\
examples:
  sparrow calibrate --target 0.75 0.86 0.92         the small embedded model, three targets
  sparrow calibrate --model-path M --prompts prompts.jsonl --target 0.86 --out m-0.86.json
  sparrow calibrate --rule published --target 0.86          page selection as in the paper
  sparrow calibrate --model-path M --check m-0.86.json      does it hold on fresh samples?

A killed run resumes where it stopped when the command is repeated. Another --target takes a second,
because the measurements are used again.

These take minutes on a GPU and hours on a CPU. A first try on two cores, some ten minutes:
  sparrow calibrate --rule published --engine-args '{"context_length": 1024}' --bin-tokens 512 \\
    --budgets 128 256 512 --prompts-per-bin 12 --new-tokens 32 --min-tokens 200 --out try.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, CalibrationOptions()
    shown_default = "(default %(default)s)"
    model = f"folder or name on the hub {shown_default}"
    add("--model-path", default=default.model_path, help=model)
    prompts = "JSONL file of prompts, each with prompt, messages or input_ids; default: built in"
    add("--prompts", type=Path, help=prompts)
    targets = f"tail percentiles to reach, one schedule each (default {DEFAULT_TARGET})"
    add("--target", type=rate, nargs="+", default=(), help=targets)
    out = "schedule file to write; with several targets, -TARGET goes before .json"
    add("--out", type=new_path, help=out)
    check = "measure whether these schedules, files or shipped names, hold their targets"
    add("--check", nargs="+", default=(), metavar="SCHEDULE", help=check)
    work = "folder for measurements, from which a run resumes; default: beside --out"
    add("--work", type=new_path, help=work)
    budgets = "KV budgets to measure, in tokens; default: 128 to 24576"
    add("--budgets", type=int, nargs="+", default=(), help=budgets)
    rule = (
        "int4 (default, except with linear attention): int4 landmarks of a few tokens each."
        " published: as in the paper"
    )
    add("--rule", choices=RULES, default=default.rule, help=rule)
    tokens = f"tokens per page (default {PAGE_SIZE})"
    add("--page-size", type=int, choices=PAGE_SIZES, help=tokens)
    bins = "positions per bin; default about 2000, or 1024 up to a context of 16384"
    add("--bin-tokens", type=count, help=bins)
    built_in = f"built-in prompts per bin (default {PROMPTS_PER_BIN})"
    add("--prompts-per-bin", type=count, help=built_in)
    counts: dict[str, tuple[Callable[[str], int], str]] = {
        "new-tokens": (at_least(2), "most new tokens per generation"),
        "samples": (at_least(1, 1024), "generations per prompt and budget"),
        "min-tokens": (count, "measured tokens that a bin needs to be judged"),
        "batch": (at_least(1, 4096), "generations at the same time"),
        "seed": (at_least(0), "seed of built-in prompts and of sampling"),
    }
    for name, (kind, what) in counts.items():
        value = getattr(default, name.replace("-", "_"))
        add(f"--{name}", type=kind, default=value, help=f"{what} {shown_default}")
    add("--engine-args", default="{}", help="further arguments of sglang.Engine, a JSON object")


def run(args: argparse.Namespace) -> int:
    """Calibrate or check; the exit code is 1 if a checked schedule does not hold its target."""
    names = {each.name for each in fields(CalibrationOptions)}
    options = CalibrationOptions(**{k: v for k, v in vars(args).items() if k in names})
    options.require_files()
    require_reachable(options.model_path, "--model-path")
    options = replace(options, engine_args=engine_arguments(args.engine_args, RESERVED))
    exit_on_sigterm()
    return _check(options) if options.check else _calibrate(options)


def _calibrate(options: CalibrationOptions) -> int:
    job = calibration_job(options)
    _announce(job)
    cost = measure_missing(job)
    if cost:
        memory = cost.get("gpu_memory_gib")
        in_use = f", {memory} GiB of the GPU in use" if memory else ""
        print(f"measured in {cost['seconds']} s{in_use}\n")
    for line in write_schedules(job, cost):
        print(line)
    print(f"to look at it: sparrow report {' '.join(map(str, job.files))}")
    return 0


def _announce(job: Job) -> None:
    prompts = {sample.prompt.name: len(sample.prompt.input_ids) for sample in job.samples}
    _require_enough(job)
    print(
        f"{len(job.samples)} generations of up to {job.options.new_tokens} tokens, from"
        f" {len(prompts)} prompts of up to {max(prompts.values())} tokens; kept in"
        f" {job.folder}",
        flush=True,
    )


def _require_enough(job: Job) -> None:
    """Raise `CalibrationError` if no bin could be judged, whatever is measured."""
    prompts, tokens = defaultdict[Any, set[str]](set), Counter[Any]()
    for sample in job.samples:
        length = len(sample.prompt.input_ids)
        cached = np.arange(length + 1, length + sample.new_tokens)
        cached = cached[sample.schedule.tokens_read(cached) < cached]
        # All bins of a check count as one: its schedules may have other bins each.
        bins = bins_of_lengths(cached, job.bin_tokens, job.page_size) * (not job.is_check)
        for of in ((sample.schedule.name, index) for index in bins.tolist()):
            prompts[of].add(sample.prompt.name)
            tokens[of] += 1
    needed = job.options.min_tokens
    if not any(len(prompts[of]) >= MIN_CLUSTERS and tokens[of] >= needed for of in tokens):
        raise CalibrationError(
            f"no bin of positions could be judged: {max(map(len, prompts.values()))} prompts and"
            f" {max(tokens.values())} tokens at most, expected {MIN_CLUSTERS} prompts and"
            f" --min-tokens {needed}; add prompts, --samples or --new-tokens"
        )


def _check(options: CalibrationOptions) -> int:
    job = check_job(options)
    _announce(job)
    measure_missing(job)
    reports = write_check(job)
    for report in reports:
        print(describe_check(report))
    print(job.out)
    return 0 if all(report["holds"] for report in reports) else 1
