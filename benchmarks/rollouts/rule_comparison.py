"""Cost of page selection by the published rule and by a calibrated one, for the same tail.

`python -m sparrow_sglang.benchmarks.rollouts.rule_comparison` runs `sparrow calibrate` under both
rules, side by side where there are two GPUs, and checks every schedule on fresh sampled responses
and along natural text. In: a model. Out: KV tokens and bytes that a step reads by length, and the
tails with their intervals, as JSON; the schedules and checks stay in the work folder.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, settings
from sparrow_sglang.benchmarks.processes import ProcessFailed, log_end, logged_process
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.rollouts.given_texts import write_texts
from sparrow_sglang.benchmarks.training.parallel_runs import visible_gpus
from sparrow_sglang.calibration.job import find_model
from sparrow_sglang.calibration.options import RULES
from sparrow_sglang.command_line import count
from sparrow_sglang.models import EMBEDDED_MODEL_NAME
from sparrow_sglang.planning.cost_model import step_costs
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import BudgetSchedule

DESCRIPTION = """\
Calibrate a model under the published and under a calibrated selection rule, check the schedules on
fresh samples and along natural text, and write what each reads for which tail.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.rollouts.rule_comparison --samples 2
  python -m sparrow_sglang.benchmarks.rollouts.rule_comparison --model-path M --targets 0.86
"""
# Budgets grow in steps of a seventh to a quarter; a smaller difference between the rules cannot be
# seen.
BUDGETS = (
    *(96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144),
)
SAMPLES, TEXT = "samples", "text"
_KV_BYTES = 2


def rule_rows(
    rule: str,
    schedules: Sequence[BudgetSchedule],
    checks: Mapping[str, Mapping[str, Any]],
    shape: ModelShape,
) -> Iterator[dict[str, Any]]:
    """A row for each schedule and position bin.

    `checks` holds the reports of `sparrow calibrate --check` on samples and along text, each by
    schedule name. `kv_tokens_read` is the mean over layers, dense ones included, of the tokens that
    a step reads at the middle of the bin; `bytes_read` counts keys, values and landmarks of one
    sequence.
    """
    for schedule in schedules:
        for index, budget in enumerate(schedule.budget_tokens):
            middle = index * schedule.bin_tokens + schedule.bin_tokens // 2
            costs = step_costs(shape, [middle], 1, schedule)
            per_token = _KV_BYTES * shape.layer_kv_width * shape.num_layers
            yield {
                "rule": rule,
                "target": schedule.tail_target,
                "bin": index,
                "cached_tokens": middle,
                "budget_tokens": budget,
                "kv_tokens_read": float(costs.kv_bytes[0]) / per_token,
                "bytes_read": float((costs.kv_bytes + costs.scoring_bytes)[0]),
            } | {
                name: _judged(report[schedule.name]["bins"], index)
                for name, report in checks.items()
            }


def _judged(bins: Sequence[Mapping[str, Any]], index: int) -> dict[str, Any]:
    """Tail, interval, tokens and verdict of one bin of a check."""
    row = next(row for row in bins if row["bin"] == index)
    names = ("tail", "tail_low", "tail_high", "tokens", "verdict")
    return {name: row.get(name) for name in names}


def commands(options: argparse.Namespace, rule: str, texts: Path) -> list[list[str]]:
    """Arguments of the `sparrow` commands of one rule, in order; each writes its `outputs`."""
    common = ["calibrate", "--model-path", options.model_path, "--seed", str(options.seed)]
    for name in ("new_tokens", "prompts_per_bin", "samples", "min_tokens", "batch"):
        common += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    common += ["--engine-args", json.dumps(options.engine_args)]
    targets = [str(target) for target in options.targets]
    out = options.work / f"{rule}.json"
    files = [str(file) for file in schedule_files(options, rule)]
    budgets = [str(budget) for budget in options.budgets]
    check = [*common, "--check", *files]
    return [
        [*common, "--rule", rule, "--budgets", *budgets, "--target", *targets, "--out", str(out)],
        [*check, "--out", str(check_file(options, rule, SAMPLES)), "--work",
         str(options.work / f"{rule}.{SAMPLES}.work")],
        [*check, "--prompts", str(texts), "--out", str(check_file(options, rule, TEXT)), "--work",
         str(options.work / f"{rule}.{TEXT}.work")],
    ]  # fmt: skip


def schedule_files(options: argparse.Namespace, rule: str) -> list[Path]:
    """The files that `sparrow calibrate` writes, one for each target."""
    if len(options.targets) == 1:
        return [options.work / f"{rule}.json"]
    return [options.work / f"{rule}-{target}.json" for target in options.targets]


def outputs(options: argparse.Namespace, rule: str) -> list[list[Path]]:
    """The files that each of `commands` has written when it ends."""
    checks = [[check_file(options, rule, name)] for name in (SAMPLES, TEXT)]
    return [schedule_files(options, rule), *checks]


def check_file(options: argparse.Namespace, rule: str, name: str) -> Path:
    return Path(options.work / f"{rule}.{name}.json")


def require_same_options(options: argparse.Namespace) -> None:
    """Record the options in the work folder; raise `ValueError` if it was made with others."""
    given = json.loads(
        json.dumps({key: value for key, value in settings(options).items() if key != "work"})
    )
    file = options.work / "options.json"
    options.work.mkdir(parents=True, exist_ok=True)
    if file.exists():
        before = json.loads(file.read_text())
        if differing := [key for key in given if before.get(key) != given[key]]:
            name = differing[0]
            raise ValueError(
                f"--work {options.work}: was made with {name}={before.get(name)!r}, got"
                f" {given[name]!r}: expected the same; name another folder"
            )
    else:
        file.write_text(json.dumps(given, indent=1))


def run_side_by_side(options: argparse.Namespace, texts: Path) -> None:
    """Run each rule's commands one after the other; with two GPUs, the rules run side by side.

    Commands whose files exist are left out. A check whose verdict is negative is a result, not a
    failure. Raises `ProcessFailed` if a command fails.
    """
    gpus = visible_gpus()
    lanes = [[*RULES]] if len(gpus) < len(RULES) else [[rule] for rule in RULES]
    waiting = [
        [
            (rule, command, files)
            for rule in lane
            for command, files in zip(
                commands(options, rule, texts), outputs(options, rule), strict=True
            )
            if not all(file.exists() for file in files)
        ]
        for lane in lanes
    ]
    while any(waiting):
        with ExitStack() as stack:
            running = []
            for gpu, lane in zip(gpus, waiting, strict=False):
                if not lane:
                    continue
                rule, words, files = lane.pop(0)
                log = options.work / f"{rule}-{len(lane)}-left.log"
                command = [sys.executable, "-m", "sparrow_sglang.commands.cli", *words]
                env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
                process = stack.enter_context(logged_process(command, log, env))
                running.append((process, log, files))
            for process, log, files in running:
                status = process.wait()
                allowed = (0, 1) if "--check" in process.args else (0,)
                # A check that fails for another reason than its verdict also ends with 1, but
                # without its files.
                if status not in allowed or not all(file.exists() for file in files):
                    raise ProcessFailed(f"status {status}; {log}:\n{log_end(log)}")


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("rollouts.rule_comparison", DESCRIPTION, EXAMPLES, "rules.json")
    add = parser.add_argument
    add("--model-path", default=EMBEDDED_MODEL_NAME, help="default: %(default)s")
    add("--targets", type=float, nargs="+", default=[0.75, 0.86, 0.92])
    add("--budgets", type=count, nargs="+", default=list(BUDGETS))
    add("--samples", type=count, default=1, help="per prompt and budget")
    add("--prompts-per-bin", type=count, default=24)
    add("--new-tokens", type=count, default=128)
    add("--min-tokens", type=count, default=1000, help="for a bin to be judged")
    add("--batch", type=count, default=128, help="generations at a time")
    add("--texts", type=count, default=192, help="slices of natural text")
    add("--seed", type=int, default=0)
    add("--engine-args", default="{}", help="JSON object of more arguments for sglang.Engine")
    add("--work", type=Path, default=Path("rule-comparison"), help="folder, to go on from")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit code is 1 if a calibration failed, 2 without usable options."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        options.engine_args = engine_arguments(options.engine_args)
        model, _, config, context = find_model(options.model_path, options.engine_args)
    except ValueError as error:
        parser.error(str(error))
    prepare_out(parser, options.out)
    try:
        require_same_options(options)
    except ValueError as error:
        parser.error(str(error))
    texts = options.work / "texts.jsonl"
    write_texts(texts, options.model_path, context, options.texts, options.new_tokens, options.seed)
    try:
        run_side_by_side(options, texts)
    except ProcessFailed as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    results = Results(options.out, settings=settings(options), model=model)
    shape = ModelShape.from_config(config.to_dict())
    for rule in RULES:
        schedules = [BudgetSchedule.from_json(path) for path in schedule_files(options, rule)]
        checks = {
            name: {
                report["schedule"]: report
                for report in json.loads(check_file(options, rule, name).read_text())["checks"]
            }
            for name in (SAMPLES, TEXT)
        }
        results.add(*rule_rows(rule, schedules, checks, shape))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
