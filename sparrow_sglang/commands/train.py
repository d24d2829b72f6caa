"""`sparrow train`: GRPO from sparse rollouts, configured by one TOML file.

In: the file's name. Out: a run in its `run_dir`. The loop is `sparrow_sglang.rl.trainer`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sparrow_sglang.config import AUTO, MODEL_DEFAULT, schedule_from
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.defaults import commented_defaults
from sparrow_sglang.rl.runs.setup import check
from sparrow_sglang.run_folder import METRICS_FILE

_EPILOG = """\
A minimal file:
  run_dir = "runs/story"
  steps = 100
  [task]
  name = "story"

sparrow train --defaults prints a file of all settings, with what they mean and where their default
values come from.

On SIGTERM and Ctrl-C the run writes a checkpoint and ends. --resume continues from the newest
checkpoint, after kill -9 too. metrics.jsonl in run_dir has a row per step; tensorboard --logdir
RUN_DIR shows the same metrics.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `train` to the subparsers of `sparrow`; `run` handles what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train with GRPO from sparse rollouts",
        description="Train a model with GRPO: sparse rollouts, dense log-probs, truncated"
        " importance sampling.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.toml", help="the run's settings"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="override a setting of the file, such as optimizer.lr=3e-6; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in run_dir"
    )
    parser.add_argument(
        "--defaults", action="store_true", help="print a file that explains all settings, and exit"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the settings, estimate the GPU memory that they need, and exit",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train. Raises `InputError` or `ScheduleError`."""
    if args.defaults:
        print(commented_defaults(), end="")
        return 0
    if args.config is None:
        raise InputError("CONFIG.toml is missing; sparrow train --defaults prints one")
    config = TrainConfig.load(args.config, args.settings)
    rank = None
    if "LOCAL_RANK" in os.environ:
        # Before `check`, because a user's module that it imports may ask for GPUs.
        from sparrow_sglang.rl.ranks import see_own_gpu

        rank = see_own_gpu()
    check(config)
    if args.check:
        return _check_all(config, args)
    train = _launch if rank is None and config.distributed.ranks != 1 else _train
    auto = config.engine.schedule == AUTO
    source = MODEL_DEFAULT if auto else f"engine.schedule in {args.config}"
    try:
        with schedule_from(source):
            return train(config, args)
    except KeyboardInterrupt:
        # Interrupted before the run handles signals itself.
        return _say_where_it_stands(config, "stopped", 130)


def _check_all(config: TrainConfig, args: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from sparrow_sglang.rl.ranks import Ranks
    from sparrow_sglang.rl.runs.checkpoint import Checkpoints
    from sparrow_sglang.rl.runs.launch import ranks_of
    from sparrow_sglang.rl.runs.memory_check import memory_report
    from sparrow_sglang.rl.runs.setup import prepare

    ranks = ranks_of(config)
    setup = prepare(config, ranks)
    checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep, Ranks(0, ranks))
    checkpoints.starting_point(config, args.resume)
    lines, fits = memory_report(config, AutoConfig.from_pretrained(setup.model_path), ranks)
    print("\n".join(["the settings can be run", *lines]))
    return 0 if fits else 1


def _launch(config: TrainConfig, args: argparse.Namespace) -> int:
    """Start the processes of a run, if it is to have several, and wait for them."""
    from sparrow_sglang.rl.runs import launch

    ranks = launch.ranks_of(config)
    if ranks == 1:
        return _train(config, args)
    launch.check(config, ranks, args.resume)
    command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(args.config)]
    command += [f"--set={setting}" for setting in args.settings] + ["--resume"] * args.resume
    code, why = launch.launch(command, ranks)
    return _say_where_it_stands(config, why, code) if code not in (0, 2) else code


def _train(config: TrainConfig, args: argparse.Namespace) -> int:
    # Imported here because they import torch and transformers.
    from transformers.utils import logging

    from sparrow_sglang.rl.engines.processes import EngineDied
    from sparrow_sglang.rl.ranks import local_rank
    from sparrow_sglang.rl.rollout import RolloutError
    from sparrow_sglang.rl.runs.run import RankFailed
    from sparrow_sglang.rl.runs.termination import Stopped
    from sparrow_sglang.rl.trainer import train

    # The progress bars of transformers last a second each and would interrupt ours.
    logging.disable_progress_bar()
    rank = local_rank()

    def end(why: str, code: int) -> int:
        if rank is None:
            return _say_where_it_stands(config, why, code)
        if rank == 0 and code == 1:
            print(f"sparrow train: {why}", file=sys.stderr)
        return code

    try:
        folder = train(config, args.resume)
    except (EngineDied, RolloutError, RankFailed, FloatingPointError) as error:
        return end(f"error: {error}", 1)
    except Stopped as stop:
        return end("stopped", int(stop.code or 0))
    if rank in (None, 0):
        print(f"trained: {folder / 'model' if folder else config.run_dir}")
    return 0


def _say_where_it_stands(config: TrainConfig, why: str, code: int) -> int:
    from sparrow_sglang.rl.runs.run import newest_checkpoint

    checkpoint = newest_checkpoint(config.run_dir)
    metrics = config.run_dir / METRICS_FILE
    if checkpoint:
        stands = f"the newest checkpoint is {checkpoint}; go on with --resume"
    elif metrics.exists() and metrics.stat().st_size:
        stands = "no checkpoint was saved; --resume begins again, or use another run_dir"
    else:
        stands = "no step was completed and nothing was saved; start again with the same command"
    print(f"sparrow train: {why}\n{stands}", file=sys.stderr)
    return code
