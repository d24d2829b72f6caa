"""Seconds of a training step: with dense rollouts, sparse ones, and sparse partial ones.

`python -m sparrow_sglang.benchmarks.training.step_times` runs it.

In: recorded response lengths, or those of `sparrow bench rollout`. Each arm runs the trainer's own
steps in a process of its own; the only change is that the engine generates exactly the given number
of tokens for each response. Out: seconds of each phase of each step, as JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, require_cuda, settings
from sparrow_sglang.benchmarks.processes import in_new_process
from sparrow_sglang.benchmarks.result_files import resumed
from sparrow_sglang.benchmarks.rollouts.lengths import GROUP, add_length_options, request_lengths
from sparrow_sglang.benchmarks.steps.comparison import (
    Comparison,
    add_model_options,
    comparison,
    require_context,
)
from sparrow_sglang.benchmarks.training import replayed_task
from sparrow_sglang.benchmarks.training.random_model import save_random_model
from sparrow_sglang.command_line import count
from sparrow_sglang.errors import SparrowError
from sparrow_sglang.rl.config import DENSE, EngineConfig, TrainConfig
from sparrow_sglang.rl.config.overrides import with_overrides
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.rollout import Sampling, groups_under_way
from sparrow_sglang.rl.runs.run import open_run
from sparrow_sglang.rl.runs.setup import prepare
from sparrow_sglang.rl.trainer import train_step
from sparrow_sglang.rl.types import Group, Rollout
from sparrow_sglang.run_folder import METRICS_FILE

ARMS = (DENSE, "sparse", "partial")
MEMORY_GB = 130.0

DESCRIPTION = """\
Time whole steps of `sparrow train` with the lengths of a recorded rollout: with dense rollouts,
with sparse ones, and with sparse ones of which a step leaves the unfinished groups to the next
(partial rollouts). Weights are random (nothing is downloaded) unless --model-path names a model.
The first step of each warms up. Arms that --out has already are left out.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.step_times --out step-times.json
  python -m sparrow_sglang.benchmarks.training.step_times --mean-tokens 1024 --max-tokens 6144 \\
      --arms sparse partial --set algorithm.old_logprobs=update
"""

Lengths = Mapping[tuple[str, int], int]
"""Lengths of responses, by prompt id and sample."""


@dataclass(frozen=True)
class RecordedSampling(Sampling):
    """Sampling of responses with given lengths, whatever tokens are drawn."""

    lengths: Lengths = field(default_factory=dict)

    def limit(self, rollout: Rollout) -> int:
        return self.lengths[rollout.prompt_id, rollout.sample]

    def parameters(self, rollout: Rollout) -> dict[str, Any]:
        return super().parameters(rollout) | {"ignore_eos": True}


class ReplayingEngine(LocalEngine):
    """A local engine that generates responses of the given lengths."""

    lengths: Lengths

    def stream(
        self, groups: Sequence[Group], sampling: Sampling, *callbacks: Any, **named: Any
    ) -> Iterator[tuple[int, Group]]:
        recorded = RecordedSampling(**vars(sampling), lengths=self.lengths)
        return super().stream(groups, recorded, *callbacks, **named)


def arm_config(
    arm: str, compared: Comparison, model: Path, options: argparse.Namespace, folder: Path
) -> TrainConfig:
    """The configuration of an arm's run; raises `InputError` on an invalid --set."""
    sparse, dense = compared.sides
    lengths = request_lengths(options)
    groups = len(lengths) // GROUP
    under_way = options.oversubscribe if arm == "partial" else 1.0
    running = groups_under_way(groups, under_way) * GROUP
    # The grammar backend would need an end-of-text token.
    server_args: dict[str, Any] = {"max_running_requests": running, "grammar_backend": "none"}
    if torch.cuda.is_available():
        server_args |= {"cuda_graph_max_bs_decode": running, "disable_prefill_cuda_graph": True}
        server_args["mem_fraction_static"] = 0.6
    if arm == DENSE:
        server_args["attention_backend"] = dense.backend
    task = {
        "prompts": groups,
        "tokens": options.prompt_tokens,
        "vocab_size": compared.config["vocab_size"],
        "seed": options.seed,
    }
    values: dict[str, Any] = {
        "run_dir": str(folder / arm),
        "steps": options.steps + 1,
        "seed": options.seed,
        "task": {"name": replayed_task.NAME, "options": task},
        "model": {"path": str(model)},
        "engine": {
            "schedule": DENSE if arm == DENSE else sparse.schedule,
            "server_args": server_args,
        },
        "rollout": {
            "prompts_per_step": groups,
            "samples_per_prompt": GROUP,
            "max_prompt_tokens": options.prompt_tokens,
            "max_new_tokens": max(lengths),
            "oversubscribe": under_way,
        },
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "logging": {"tensorboard": False, "response_groups": 0},
    }
    return TrainConfig.parse(with_overrides(values, options.overrides, TrainConfig), "--set")


def run_arm(config: TrainConfig, lengths: Sequence[int]) -> list[dict[str, float]]:
    """Metrics of the steps of a run whose responses have these lengths, group after group."""
    recorded = {(str(i // GROUP), i % GROUP): length for i, length in enumerate(lengths)}

    def engine(asked: EngineConfig, path: str, defaults: Mapping[str, Any]) -> ReplayingEngine:
        opened = ReplayingEngine(path, asked.schedule, **{**defaults, **asked.server_args})
        opened.lengths = recorded
        return opened

    with open_run(config, prepare(config), False, engine) as run:
        try:
            for step in range(config.steps):
                train_step(run, step)
        finally:
            # With no steps taken, the run writes no checkpoint (tens of gigabytes) at its end.
            run.progress.steps_taken = 0
    lines = (config.run_dir / METRICS_FILE).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def row_of(
    arm: str, compared: Comparison, config: TrainConfig, metrics: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """The row of an arm; its lists hold the steps after the first, which is a warm-up."""
    first, *timed = metrics
    sequences = config.rollout.prompts_per_step * GROUP
    tokens = [round(row["response_length/mean"] * sequences) for row in timed]
    names = sorted({name for row in timed for name in row if name.startswith("timing_s/")})
    seconds = {
        name.removeprefix("timing_s/"): [row.get(name, 0.0) for row in timed] for name in names
    }
    step_s = sum(seconds["step"]) / len(timed)
    return {
        "arm": arm,
        "model": compared.model,
        "schedule": None if arm == DENSE else config.engine.schedule,
        "sequences": sequences,
        "steps": len(timed),
        "step_mean_s": step_s,
        "trained_tokens_per_s": sum(tokens) / len(timed) / step_s,
        "warm_up_s": first["timing_s/step"],
        "trained_tokens": tokens,
        "sampled_tokens": [
            round(row["sparrow/rollout_tokens_per_s"] * row["timing_s/rollout"]) for row in timed
        ],
        "longest": [round(row["response_length/max"]) for row in timed],
        "stale_token_fraction": [row.get("sparrow/stale_token_fraction", 0.0) for row in timed],
        "seconds": seconds,
    }


def measure(arm: str, compared: Comparison, options: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps of an arm."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), compared.path
        if not compared.has_weights:
            model = folder / "model"
            save_random_model(options.model, model)
            torch.cuda.empty_cache()
        config = arm_config(arm, compared, model, options, folder)
        metrics = run_arm(config, request_lengths(options))
    return row_of(arm, compared, config, metrics)


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("training.step_times", DESCRIPTION, EXAMPLES, "step-times.json")
    add_model_options(parser)
    add_length_options(parser)
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=ARMS, help="(default: all)")
    add("--steps", type=count, default=3, help="timed steps, after one to warm up")
    add("--oversubscribe", type=float, default=1.5, help="of partial (default: %(default)s)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace a setting of the runs, as of sparrow train; may be repeated")  # fmt: skip
    return parser


def _check(options: argparse.Namespace, on_gpu: bool) -> Comparison:
    compared = comparison(options, on_gpu)
    lengths = request_lengths(options)
    if len(lengths) % GROUP:
        raise ValueError(
            f"--lengths-file {options.lengths_file}: has {len(lengths)} lengths; expected a"
            f" multiple of {GROUP}, the size of a group"
        )
    context = compared.config["max_position_embeddings"]
    require_context(context, options.prompt_tokens, max(lengths))
    for arm in options.arms:
        rollout = arm_config(arm, compared, compared.path, options, Path("runs")).rollout
        if rollout.prompts_per_step * rollout.samples_per_prompt != len(lengths):
            raise ValueError(
                f"--set rollout: {rollout.prompts_per_step} prompts a step with"
                f" {rollout.samples_per_prompt} samples each, but there are {len(lengths)} lengths;"
                " expected neither to be set, as --sequences sets both"
            )
    return compared


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write; the exit code is 1 if an arm failed, 2 without usable options or GPUs."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        compared = _check(options, torch.cuda.is_available())
    except (ValueError, SparrowError) as error:
        parser.error(str(error))
    if not compared.has_weights:
        require_cuda(parser, MEMORY_GB, "a trainer and an engine")
    prepare_out(parser, options.out)
    recorded = settings(options) | {"lengths": request_lengths(options)}
    del recorded["arms"]
    try:
        results = resumed(options.out, {"settings": recorded})
    except ValueError as error:
        parser.error(str(error))
    done = {row["arm"] for row in results.rows}
    for arm in [arm for arm in options.arms if arm not in done]:
        row = in_new_process(measure, arm, compared, options)
        if row is None:
            print(f"{compared.model} {arm}: failed, left out", flush=True)
            return 1
        results.add(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
