"""verl's trainer with dense and with sparse rollouts.

`python -m sparrow_sglang.benchmarks.training.verl_runs` runs it, in an environment that has verl.

In: a recipe of examples/verl, schedules and seeds. Each pair of schedule and seed is a run of the
unmodified `verl.trainer.main_ppo` from the same start, in a process of its own; runs are spread
over the visible GPUs. Out: the metrics in verl's own log of each run, as JSON, with device,
versions and commit.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np

from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, settings
from sparrow_sglang.benchmarks.processes import log_end, logged_process, with_modules
from sparrow_sglang.benchmarks.result_files import Results, resumed, whole_rows
from sparrow_sglang.benchmarks.training.parallel_runs import visible_gpus
from sparrow_sglang.command_line import count
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder
from sparrow_sglang.rl.config import DENSE

DESCRIPTION = """\
Train with verl from the same start under several schedules and seeds, and write what verl says of
the runs side by side. After --limit seconds, running ones are ended and no others started. Results
are written while runs go on. When the command is repeated, runs that verl has completed are left
out, and others begin anew.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.verl_runs examples/verl/words_grpo.yaml \\
      --schedules dense smollm2-135m-0.86 --seeds 0 1 --limit 420 --out verl_words.json \\
      --dense-set actor_rollout_ref.rollout.agent.default_agent_loop=unrecorded
"""
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.sglang"
CURVES = (
    "critic/score/",
    "response_length/",
    "prompt_length/mean",
    "rollout_corr/",
    "training/rollout_probs_diff_",
    "actor/entropy",
    "actor/grad_norm",
    "perf/throughput",
    "perf/total_num_tokens",
    "timing_s/",
    "val-",
    "sparrow/",
)
WRITE_S = 30.0
_LOOK_S = 1.0


@dataclass(frozen=True)
class VerlRun:
    """One run; `folder` receives all that it writes."""

    schedule: str
    seed: int
    folder: Path

    @property
    def is_dense(self) -> bool:
        return self.schedule == DENSE

    @property
    def name(self) -> str:
        return f"{Path(self.schedule).name.removesuffix('.json')}-seed{self.seed}"

    def command(self, recipe: Path, model: str, overrides: Sequence[str]) -> list[str]:
        """The trainer's command line."""
        ours = [
            f"actor_rollout_ref.model.path={_for_the_trainer(model)}",
            f"data.seed={self.seed}",
            f"actor_rollout_ref.actor.data_loader_seed={self.seed}",
            f"++{ENGINE}.random_seed={self.seed}",
            f"trainer.default_local_dir={self._checkpoints}",
            # Each run starts a Ray cluster of its own. It stays in Ray's default folder, as
            # sockets need a short path.
            "++ray_kwargs.ray_init.address=local",
            f"hydra.run.dir={self.folder / 'hydra'}",
        ]
        if self.is_dense:
            # flashinfer is verl's own default for this SGLang version.
            ours += [f"{ENGINE}.attention_backend=flashinfer", f"~{ENGINE}.sparrow_schedule"]
        else:
            ours += [f"{ENGINE}.sparrow_schedule={_for_the_trainer(self.schedule)}"]
        flags = ["--config-dir", ".", "--config-name", recipe.stem]
        return [sys.executable, "-m", "verl.trainer.main_ppo", *flags, *ours, *overrides]

    def environment(self, gpu: str, recipe: Path) -> dict[str, str]:
        """Environment of the trainer, which passes it on to its workers."""
        ours = {"VERL_FILE_LOGGER_PATH": str(self._metrics)}
        ours |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        # The recipe's folder holds modules that the recipe names, such as agent loops.
        return with_modules(recipe.parent.resolve()) | ours

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def begin(self) -> None:
        """Make the folder, and delete metrics and checkpoints of an earlier start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics.unlink(missing_ok=True)
        # verl would go on from the newest one, and the steps before it would be missing.
        shutil.rmtree(self._checkpoints, ignore_errors=True)

    def rows(self) -> list[dict[str, Any]]:
        """Step and metrics of each complete line of the log."""
        return whole_rows(self._metrics)


def _for_the_trainer(name: str) -> str:
    """A path that exists here, as the trainer, which runs in the recipe's folder, can find it."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def result_of(run: VerlRun) -> dict[str, Any]:
    """Curves of [step, value] from verl's log, and means over all steps but the first."""
    rows = run.rows()
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        for metric, value in row["data"].items():
            if metric.startswith(CURVES) and isinstance(value, int | float):
                curves.setdefault(metric, []).append([row["step"], float(value)])
    return {
        "run": run.name,
        "schedule": run.schedule,
        "seed": run.seed,
        "steps": max((row["step"] for row in rows), default=0),
        # The first step is a warm-up. A phase that does not run in every step is averaged over
        # the steps in which it ran.
        "seconds_per_step": dict(_means(curves, "timing_s/")),
        "tokens_per_s": dict(_means(curves, "perf/throughput")).get("perf/throughput"),
        "curves": curves,
    }


def _means(curves: Mapping[str, list[list[float]]], prefix: str) -> Iterator[tuple[str, float]]:
    for metric, points in curves.items():
        values = [value for step, value in points if step > 1]
        if metric.startswith(prefix) and values:
            yield metric, float(np.mean(values))


@dataclass(frozen=True)
class Trainer:
    """Settings of all runs; `overrides` apply to all, `dense` to dense runs, in verl's syntax."""

    recipe: Path
    model: str
    overrides: Sequence[str] = ()
    dense: Sequence[str] = ()

    def started(self, run: VerlRun, gpu: str) -> AbstractContextManager["Popen[bytes]"]:
        """A context with the process of a run, which is killed on leaving."""
        overrides = [*self.overrides, *(self.dense if run.is_dense else [])]
        return logged_process(
            run.command(self.recipe, self.model, overrides),
            run.log,
            run.environment(gpu, self.recipe),
            self.recipe.parent,
            stop_s=0,
        )


def run_all(
    runs: Sequence[VerlRun], trainer: Trainer, limit_s: float, parallel: int, results: Results
) -> int:
    """Run `parallel` of them at a time, spread over the visible GPUs; return how many failed.

    `results` are written whenever a run ends, every half minute, and before runs are killed. After
    `limit_s` seconds in total, runs still going are killed and no others are started.
    """
    gpus = visible_gpus()
    started: list[tuple[VerlRun, Popen[bytes]]] = []
    end = time.monotonic() + limit_s
    for first in range(0, len(runs), parallel):
        with ExitStack() as processes:
            for index, run in enumerate(runs[first : first + parallel]):
                run.begin()
                process = processes.enter_context(trainer.started(run, gpus[index % len(gpus)]))
                started.append((run, process))
            try:
                _watch(started, end, results)
            finally:
                write_rows(started, results)
        if time.monotonic() >= end:
            break
    # A trainer that exits with status 0 but without a step has trained nothing.
    failed = [(run, process) for run, process in started if process.returncode or not run.rows()]
    for run, process in failed:
        print(f"{run.name}: ended with status {process.returncode}:\n{log_end(run.log)}")
    return len(failed) + len(runs) - len(started)


def _watch(started: Sequence[tuple[VerlRun, "Popen[bytes]"]], end: float, results: Results) -> None:
    """Write results until all processes have ended, or until the time `end`."""
    running, written = started, time.monotonic()
    while running and time.monotonic() < end:
        time.sleep(_LOOK_S)
        before = running
        running = [pair for pair in started if pair[1].poll() is None]
        if len(running) < len(before) or time.monotonic() > written + WRITE_S:
            write_rows(started, results)
            written = time.monotonic()


def write_rows(started: Sequence[tuple[VerlRun, "Popen[bytes]"]], results: Results) -> None:
    """Write the rows of these runs; a row of an earlier start that has more steps is kept."""
    rows = {(row["schedule"], row["seed"]): row for row in results.rows}
    for run, process in started:
        row = result_of(run)
        row["complete"] = process.poll() == 0 and row["steps"] > 0
        earlier = rows.get((run.schedule, run.seed))
        if earlier is None or row["steps"] >= earlier["steps"]:
            rows[run.schedule, run.seed] = row
    results.rows = [*rows.values()]
    results.save()


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write; the exit code is 1 if a run has failed or was ended."""
    parser = benchmark_parser("training.verl_runs", DESCRIPTION, EXAMPLES, "verl_runs.json")
    parser.add_argument("recipe", type=Path, help="YAML file beside the modules that it names")
    parser.add_argument(
        "--model", default=EMBEDDED_MODEL_NAME, help="folder (default: %(default)s)"
    )
    parser.add_argument("--schedules", nargs="+", default=[DENSE, "smollm2-135m-0.86"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--parallel", type=count, help="runs at a time (default: all)")
    parser.add_argument("--limit", type=count, default=3600, help="seconds for all runs")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="as verl takes it"
    )
    parser.add_argument("--dense-set", nargs="*", default=[], metavar="KEY=VALUE", help="for dense")
    parser.add_argument("--work", type=Path, default=Path("runs/verl"))
    args = parser.parse_args(argv)
    if not args.recipe.is_file():
        parser.error(f"recipe {args.recipe}: no such file")
    prepare_out(parser, args.out)
    model = model_folder(args.model)
    work = args.work.resolve()
    runs = [
        VerlRun(schedule, seed, work / f"{index}-{seed}")
        for seed in args.seeds
        for index, schedule in enumerate(args.schedules)
    ]
    packages = {name: version(name) for name in ("verl", "ray", "TransferQueue")}
    recorded = settings(args) | {"recipe_text": args.recipe.read_text("utf-8")}
    del recorded["limit"]
    try:
        results = resumed(args.out, {"settings": recorded, "frameworks": packages})
    except ValueError as error:
        parser.error(str(error))
    complete = [(row["schedule"], row["seed"]) for row in results.rows if row["complete"]]
    trainer = Trainer(args.recipe, model, args.set, args.dense_set)
    failed = run_all(
        [run for run in runs if (run.schedule, run.seed) not in complete],
        trainer,
        args.limit,
        args.parallel or len(runs),
        results,
    )
    for row in results.rows:
        print(f"{row['run']}: {row['steps']} steps, {row['tokens_per_s'] or 0:.0f} tokens/s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
