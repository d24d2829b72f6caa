"""`sparrow train`: GRPO from sparse rollouts, out of one TOML file.

In: the file's name. Out: a run in its `run_dir`. The loop is `sparrow_sglang.rl.trainer`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.config import TrainConfig

_EPILOG = """\
A minimal file:
  run_dir = "runs/story"
  steps = 100
  [task]
  name = "story"

SIGTERM and Ctrl-C write a checkpoint and end the run; --resume goes on from the newest one, after
kill -9 too. metrics.jsonl in run_dir has a row per step; tensorboard --logdir shows the same.
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
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="the run's settings")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in run_dir"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train. Raises `ValueError` (a `ConfigError`, `ScheduleError` or `CheckpointError`)."""
    config = TrainConfig.load(args.config)
    # Late, as they import torch and transformers.
    from transformers.utils import logging

    from sparrow_sglang.rl.engines.engine import EngineDied
    from sparrow_sglang.rl.rollout import RolloutError
    from sparrow_sglang.rl.runs.run import newest_checkpoint
    from sparrow_sglang.rl.runs.termination import Stopped
    from sparrow_sglang.rl.trainer import train

    # Bars of a second each, in the middle of ours.
    logging.disable_progress_bar()
    try:
        folder = train(config, args.resume)
    except (EngineDied, RolloutError, FloatingPointError) as error:
        print(f"sparrow train: error: {error}", file=sys.stderr)
        _say_where_it_stands(newest_checkpoint(config.run_dir))
        return 1
    except Stopped as stop:
        print("sparrow train: stopped", file=sys.stderr)
        _say_where_it_stands(newest_checkpoint(config.run_dir))
        return int(stop.code or 0)
    print(f"trained: {folder / 'model' if folder else config.run_dir}")
    return 0


def _say_where_it_stands(checkpoint: Path | None) -> None:
    found = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    print(f"{found}; go on with --resume", file=sys.stderr)
