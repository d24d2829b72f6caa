"""The study: where does reinforcement learning from sparse rollouts stay stable, and where not?

A small Qwen3 model learns a task from random weights, is calibrated, and is then trained by GRPO
from the same checkpoint under dense rollouts, calibrated schedules, fixed budgets, and
DistillSparse. Stages: model, schedules, runs, distillation at fixed schedules, summary. Each is
skipped if its result is there, and a run goes on from its last checkpoint, so a study that was
stopped goes on when the command is repeated. What to run is in study.toml.

  python examples/stability/study.py                         one GPU
  python examples/stability/study.py --arms dense fixed-64   only the runs of these arms
  python examples/stability/study.py --scale tiny            any machine, to see that it works

The results folder in the output folder then holds summary.md and the metrics; curves.py draws
them, and `sparrow report` makes a page of them.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from graph_walk import save_prompts
from pretraining import pretrain
from study_settings import CALIBRATED, StudySettings
from summary import write_summary

from sparrow_sglang.atomic_write import write_json, write_text
from sparrow_sglang.benchmarks.options import exit_on_sigterm
from sparrow_sglang.benchmarks.processes import ProcessFailed
from sparrow_sglang.benchmarks.training.parallel_runs import RunPlan, run_all
from sparrow_sglang.command_line import count
from sparrow_sglang.errors import InputError

SETTINGS = Path(__file__).with_name("study.toml")
# Graphs that no run trains on or is evaluated on.
CALIBRATION_SEED, DISTILLATION_SEED = 1_000_003, 1_000_033
# Metrics of each step that the results keep, to six digits: what is judged, and what was trained.
KEPT = re.compile(
    r"step|critic/score/mean|response_length/mean|eval/pass_rate(_stderr)?|rollout_corr/(k3_)?kl"
    r"|sparrow/(accept|kv_tokens|distill|vetoed)_.*|actor/(entropy|grad_norm|lr)|timing_s/step"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; the exit code is 1 if a stage failed, 2 if a setting is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", default="full", help="table of study.toml: full (default) or tiny")
    add("--out", type=Path, help="folder of all results; default runs/stability-SCALE")
    add("--arms", nargs="+", metavar="ARM", help="arms to run; default: all of study.toml")
    add("--parallel", type=count, help="runs at a time on each GPU; default: that of study.toml")
    args = parser.parse_args(argv)
    exit_on_sigterm()
    try:
        settings = StudySettings.load(SETTINGS, args.scale)
        out = (args.out or Path("runs") / f"stability-{args.scale}").resolve()
        study(settings, out, args.parallel or settings.parallel, args.arms)
    except InputError as error:
        print(f"study: error: {error}", file=sys.stderr)
        return 2
    except ProcessFailed as error:
        print(f"study: error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as stop:
        print("study: stopped; repeat the command to go on", file=sys.stderr)
        return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0)
    return 0


def study(
    settings: StudySettings, out: Path, parallel: int, arms: Sequence[str] | None = None
) -> None:
    """All stages, into `out`. With `arms` only their runs and what these need.

    Two processes may share `out` once its model is there, if they run different arms.

    Raises `InputError` if there is no such arm or `out` holds a study of other settings, or as the
    stages do.
    """
    for arm in arms or ():
        if arm not in settings.arms:
            raise InputError(f"--arms {arm}: expected some of {', '.join(settings.arms)}")
    results = out / "results"
    schedules = schedule_files(settings, results)
    # Plan the runs first, so that a wrong setting of theirs is not found only after hours.
    plans = settings.plan_runs(out / "model", schedules, out / "runs")
    _own(results / "settings.json", settings)
    model = make_model(settings, out)
    chosen = [plan for plan in plans if arms is None or plan.arm in arms]
    if arms is None or any(settings.arms[plan.arm].schedule in schedules for plan in chosen):
        calibrate(settings, model, results)
    run_all(chosen, parallel, [Path(__file__).parent])
    if arms is None:
        distil(settings, model, schedules, results)
    collect(plans, results)
    print(f"{results / 'summary.md'}; a page of it: sparrow report {results}")


def make_model(settings: StudySettings, out: Path) -> Path:
    """The pretrained checkpoint."""
    model, record = out / "model", out / "results" / "pretraining.json"
    if not record.exists():
        write_json(record, pretrain(settings, model))
    return model


def schedule_files(settings: StudySettings, results: Path) -> Mapping[str, Path]:
    """What the calibration writes, by the names that arms use."""
    folder = results / "schedules"
    targets = settings.calibration.targets
    return {f"{CALIBRATED}{target}": folder / f"walk-{target}.json" for target in targets}


def calibrate(settings: StudySettings, model: Path, results: Path) -> None:
    """Write the schedules that are missing; raises `ProcessFailed` if `sparrow calibrate` does."""
    plan, folder = settings.calibration, results / "schedules"
    if all(file.exists() for file in schedule_files(settings, results).values()):
        return
    folder.mkdir(exist_ok=True)
    prompts = results.parent / "calibration.jsonl"
    save_prompts(prompts, settings.walk, plan.prompts, CALIBRATION_SEED)
    # With a single target, `sparrow calibrate` writes to exactly the name given.
    name = "walk.json" if len(plan.targets) > 1 else f"walk-{plan.targets[0]}.json"
    options = {
        "--model-path": [model],
        "--prompts": [prompts],
        "--target": plan.targets,
        "--out": [folder / name],
        "--work": [results.parent / "calibration"],
        "--budgets": plan.budgets,
        "--bin-tokens": [plan.bin_tokens],
        "--min-tokens": [plan.min_tokens],
        "--new-tokens": [settings.walk.response_tokens()],
        "--engine-args": [json.dumps(settings.server_args)],
    }
    _run("the calibration", ["sparrow_sglang.commands.cli", "calibrate"], options)


def distil(
    settings: StudySettings, model: Path, schedules: Mapping[str, Path], results: Path
) -> None:
    """What an adapter gains without any reinforcement learning; raises `ProcessFailed`."""
    result, plan = results / "distillation.json", settings.distillation
    if result.exists():
        return
    prompts, count = results.parent / "distillation.jsonl", plan.responses * max(plan.steps)
    save_prompts(prompts, settings.walk, plan.heldout + count, DISTILLATION_SEED)
    # The benchmark writes after each arm, and is complete when it has ended.
    out = results.parent / result.name
    options = {
        "--model": [model],
        "--prompts": [prompts],
        "--schedules": [schedules.get(name, name) for name in plan.schedules],
        "--out": [out],
        "--lr": [plan.lr],
        "--steps": plan.steps,
        "--responses": [plan.responses],
        "--heldout": [plan.heldout],
        "--bin-tokens": [settings.calibration.bin_tokens],
        "--context": [settings.context_tokens],
        "--new-tokens": [settings.walk.response_tokens()],
        "--engine-args": [json.dumps(settings.server_args)],
    }
    _run("the distillation", ["sparrow_sglang.benchmarks.training.distill_gain"], options)
    out.rename(result)


def _run(what: str, module: Sequence[str], options: Mapping[str, Sequence[Any]]) -> None:
    words = [str(word) for option, values in options.items() for word in (option, *values)]
    if subprocess.run([sys.executable, "-m", *module, *words]).returncode:
        raise ProcessFailed(f"{what} has failed; repeat the command to go on")


def collect(plans: Sequence[RunPlan], results: Path) -> None:
    """Write the `KEPT` metrics of all complete runs into `results`, and their summary."""
    folder = results / "metrics"
    folder.mkdir(exist_ok=True)
    for plan in plans:
        if plan.is_complete():
            rows = [
                {name: float(f"{value:.6g}") for name, value in row.items() if KEPT.fullmatch(name)}
                for row in plan.rows()
            ]
            text = "".join(json.dumps(row | {"step": int(row["step"])}) + "\n" for row in rows)
            write_text(folder / f"{plan.name}.jsonl", text)
    write_summary(results)


def _own(path: Path, settings: StudySettings) -> None:
    """Note the settings of a study.

    They may differ from those noted before in seeds, `parallel` and further arms only.
    """
    values = settings.model_dump(mode="json", exclude={"parallel"})
    noted = json.loads(path.read_text("utf-8")) if path.exists() else values
    fixed, begun = (_without_seeds(of, noted["arms"]) for of in (values, noted))
    for key, value in fixed.items():
        before = begun.get(key)
        if before != value:
            raise InputError(
                f"{key}={value!r}: the study in {path.parents[1]} was begun with"
                f" {before!r}; set it back, or use another --out"
            )
    write_json(path, values)


def _without_seeds(values: Mapping[str, Any], arms: Collection[str]) -> dict[str, Any]:
    """Settings with `arms` only, and without any seeds."""
    kept = {
        name: {key: value for key, value in arm.items() if key != "seeds"}
        for name, arm in values["arms"].items()
        if name in arms
    }
    return {key: value for key, value in values.items() if key != "seeds"} | {"arms": kept}


if __name__ == "__main__":
    sys.exit(main())
