"""Dense against sparse rollouts.

`python -m sparrow_sglang.benchmarks.training.learning_curves` runs it.

In: a training configuration, schedules and seeds; an `attention_backend` among the engine's
arguments is that of the dense runs. Each pair is a run of `sparrow train` from the same start;
several are under way at a time, and those that were stopped go on when the command is repeated.
Out: the curves as JSON, with device, versions and commit, and a plot.
"""

import copy
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.options import (
    benchmark_parser,
    exit_on_sigterm,
    prepare_out,
    settings,
)
from sparrow_sglang.benchmarks.training.parallel_runs import RunFailed, RunPlan, merged, run_all
from sparrow_sglang.command_line import count
from sparrow_sglang.errors import InputError
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.rollout import DENSE

DESCRIPTION = """\
Train from the same start under several schedules and seeds, and write the curves side by side.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.learning_curves examples/story_curves.toml \\
      --schedules dense smollm2-135m-0.86 --seeds 0 1 2 --parallel 6 --out learning_curves.json
"""
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
    path: Path, schedules: Sequence[str], seeds: Sequence[int], work: Path
) -> list[RunPlan]:
    """The runs, all seeds of a schedule together; raises `InputError` as `TrainConfig` does."""
    base = tomllib.loads(path.read_text("utf-8"))
    plans = []
    for schedule in schedules:
        arm = Path(schedule).name.removesuffix(".json")
        for seed in seeds:
            ours = {
                "run_dir": str(work / f"{arm}-seed{seed}"),
                "seed": seed,
                "engine": {"schedule": schedule},
            }
            values = copy.deepcopy(merged(base, ours))
            if schedule != DENSE:
                # Of sparse rollouts, the schedule says it.
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
    """What the runs have measured so far: per run, its curves and the mean times of a step."""
    runs = []
    for plan in plans:
        rows = plan.rows()
        # The first step warms up.
        times = sorted({key for row in rows for key in row if key.startswith("timing_s/")})
        seconds = {
            key: float(np.mean([row[key] for row in rows[1:] if key in row] or [0.0]))
            for key in times
        }
        runs.append(
            {
                "run": plan.name,
                "schedule": plan.config.engine.schedule,
                "seed": plan.seed,
                "steps": max((row["step"] for row in rows), default=0),
                "curves": curves_of(rows, CURVES),
                "seconds_per_step": seconds,
            }
        )
    return runs


def plot(path: Path, runs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> None:
    """A panel per metric against steps: thin lines the runs, thick ones means over the seeds of a
    schedule, which has one colour in all panels."""
    from matplotlib.figure import Figure

    panel_rows = -(-len(metrics) // 2)
    figure = Figure(figsize=(11, 3.5 * panel_rows), layout="constrained")
    schedules = list(dict.fromkeys(run["schedule"] for run in runs))
    for axes, metric in zip(figure.subplots(panel_rows, 2).flat, metrics, strict=False):
        for index, schedule in enumerate(schedules):
            curves = [dict(run["curves"][metric]) for run in runs if run["schedule"] == schedule]
            colour, name = f"C{index}", Path(schedule).name.removesuffix(".json")
            for curve in curves:
                axes.plot(curve.keys(), curve.values(), color=colour, alpha=0.3, linewidth=1)
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            means = [np.mean([curve[step] for curve in curves]) for step in steps]
            axes.plot(steps, means, color=colour, linewidth=2, label=name)
        axes.set(title=metric, xlabel="step")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write and plot; the exit code is 1 if a run is incomplete, 2 if a setting is wrong."""
    parser = benchmark_parser(
        "training.learning_curves", DESCRIPTION, EXAMPLES, "learning_curves.json"
    )
    parser.add_argument("config", type=Path, help="TOML file of `sparrow train`")
    parser.add_argument("--schedules", nargs="+", default=["dense", "auto"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=count, default=1, help="runs at a time on each GPU")
    parser.add_argument("--work", type=Path, default=Path("runs/learning_curves"))
    args = parser.parse_args(argv)
    try:
        plans = plan_runs(args.config, args.schedules, args.seeds, args.work)
    except (InputError, OSError, tomllib.TOMLDecodeError) as error:
        parser.error(str(error))
    prepare_out(parser, args.out)
    args.work.mkdir(parents=True, exist_ok=True)
    recorded = settings(args) | {
        "config": args.config.name,
        "train": tomllib.loads(args.config.read_text("utf-8")),
    }
    del recorded["work"]
    exit_on_sigterm()
    try:
        run_all(plans, args.parallel)
    except RunFailed as error:
        print(f"learning-curves: error: {error}", file=sys.stderr)
    except (KeyboardInterrupt, SystemExit):
        print("stopped; repeat the command to go on", file=sys.stderr)
    finally:
        found = collect(plans)
        write_json(args.out, {**provenance(), "settings": recorded, "rows": found})
        plot(args.out.with_suffix(".png"), found, CURVES[:4])
    wanted = plans[0].config.steps
    for run in found:
        rates = run["curves"]["eval/pass_rate"]
        text = f"{rates[0][1]:.3f} -> {rates[-1][1]:.3f}" if rates else "no evaluation"
        print(f"{run['run']}: {run['steps']} of {wanted} steps, held-out pass rate {text}")
    return int(any(run["steps"] < wanted for run in found))


if __name__ == "__main__":
    raise SystemExit(main())
