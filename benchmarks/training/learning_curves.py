"""Learning curves with dense and with sparse rollouts.

`python -m sparrow_sglang.benchmarks.training.learning_curves` runs it.

In: a training configuration, schedules and seeds; an `attention_backend` among the engine's
arguments applies to the dense runs only. Each pair of schedule and seed is a run of `sparrow train`
from the same start. Several runs are under way at a time, and stopped runs go on when the command
is repeated. Out: the curves as JSON, with device, versions and commit; `sparrow report` draws them.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, settings
from sparrow_sglang.benchmarks.processes import ProcessFailed
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.training.parallel_runs import RunPlan, merged, run_all
from sparrow_sglang.command_line import count
from sparrow_sglang.config import read_toml
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import DENSE, TrainConfig

DESCRIPTION = """\
Train from the same start under several schedules and seeds, and write the curves side by side.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.learning_curves examples/story_curves.toml \\
      --schedules dense smollm2-135m-0.86 --seeds 0 1 2 --parallel 6 --out learning_curves.json
  python -m sparrow_sglang.benchmarks.training.learning_curves examples/story_curves.toml \\
      --schedules smollm2-135m-0.86 --partial smollm2-135m-0.86 --parallel 6
"""
OVERSUBSCRIBE = 1.5
"""`rollout.oversubscribe` of the runs with partial rollouts."""
CURVES = (
    "eval/pass_rate",
    "critic/score/mean",
    "response_length/mean",
    "sparrow/accept_p05",
    "sparrow/kv_tokens_read",
    "sparrow/kv_tokens_cached",
    "rollout_corr/kl",
)


def plan_runs(
    path: Path,
    schedules: Sequence[str],
    seeds: Sequence[int],
    work: Path,
    partial: Sequence[str] = (),
) -> list[RunPlan]:
    """The runs, grouped by schedule; those of `partial` come last and use partial rollouts.

    Raises `InputError` as `TrainConfig` does.
    """
    base = read_toml(path)
    plans = []
    for schedule, oversubscribe in [
        *((schedule, None) for schedule in schedules),
        *((schedule, OVERSUBSCRIBE) for schedule in partial),
    ]:
        arm = Path(schedule).name.removesuffix(".json")
        arm += ", partial" if oversubscribe else ""
        for seed in seeds:
            ours = {
                "run_dir": str(work / f"{arm.replace(', ', '-')}-seed{seed}"),
                "seed": seed,
                "engine": {"schedule": schedule},
                "rollout": {"oversubscribe": oversubscribe} if oversubscribe else {},
            }
            values = copy.deepcopy(merged(base, ours))
            if schedule != DENSE:
                # A schedule already sets the backend of sparse rollouts.
                values["engine"].get("server_args", {}).pop("attention_backend", None)
            plans.append(RunPlan(arm, seed, TrainConfig.parse(values, str(path)), values))
    return plans


def curves_of(
    rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> dict[str, list[list[float]]]:
    """[step, value] of each metric, over the rows that have it."""
    return {
        metric: [[row["step"], row[metric]] for row in rows if metric in row] for metric in metrics
    }


def collect(plans: Sequence[RunPlan]) -> list[dict[str, Any]]:
    """Results of the runs so far: for each run, its curves and the mean times of a step."""
    runs = []
    for plan in plans:
        rows = plan.rows()
        # The first step is a warm-up and does not count.
        times = sorted({key for row in rows for key in row if key.startswith("timing_s/")})
        seconds = {
            key: float(np.mean([row[key] for row in rows[1:] if key in row] or [0.0]))
            for key in times
        }
        runs.append(
            {
                "run": plan.name,
                "arm": plan.arm,
                "schedule": plan.config.engine.schedule,
                "seed": plan.seed,
                "steps": max((row["step"] for row in rows), default=0),
                "curves": curves_of(rows, CURVES),
                "seconds_per_step": seconds,
            }
        )
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write; the exit code is 1 if a run is incomplete, 2 if a setting is wrong."""
    parser = benchmark_parser(
        "training.learning_curves", DESCRIPTION, EXAMPLES, "learning_curves.json"
    )
    parser.add_argument("config", type=Path, help="TOML file of `sparrow train`")
    parser.add_argument("--schedules", nargs="+", default=["dense", "auto"])
    parser.add_argument(
        "--partial",
        nargs="+",
        default=[],
        metavar="SCHEDULE",
        help=f"as well, with partial rollouts: {OVERSUBSCRIBE} times the groups under way",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=count, default=1, help="runs at a time on each GPU")
    parser.add_argument("--work", type=Path, default=Path("runs/learning_curves"))
    args = parser.parse_args(argv)
    try:
        plans = plan_runs(args.config, args.schedules, args.seeds, args.work, args.partial)
        for plan in plans:
            plan.require_same_settings()
    except InputError as error:
        parser.error(str(error))
    prepare_out(parser, args.out)
    args.work.mkdir(parents=True, exist_ok=True)
    recorded = settings(args) | {
        "config": args.config.name,
        "train": read_toml(args.config),
    }
    del recorded["work"]
    try:
        run_all(plans, args.parallel)
    except ProcessFailed as error:
        print(f"learning-curves: error: {error}", file=sys.stderr)
    except (KeyboardInterrupt, SystemExit):
        print("stopped; repeat the command to go on", file=sys.stderr)
    finally:
        results = Results(args.out, settings=recorded)
        results.add(*collect(plans))
    for run in results.rows:
        print(f"{run['run']}: held-out pass rate by step {dict(run['curves']['eval/pass_rate'])}")
    return int(any(run["steps"] < plans[0].config.steps for run in results.rows))


if __name__ == "__main__":
    raise SystemExit(main())
