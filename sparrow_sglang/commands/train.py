"""`sparrow train`: GRPO from sparse rollouts, configured by one TOML file."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparrow_sglang.errors import InputError
from sparrow_sglang.models import require_reachable
from sparrow_sglang.rl.config import TrainConfig, commented_defaults
from sparrow_sglang.rl.runs.setup import check_settings
from sparrow_sglang.run_folder import METRICS_FILE
from sparrow_sglang.sglang_compat.arguments import read_model_config, resolve, resolved

if TYPE_CHECKING:
    from sparrow_sglang.rl.runs.setup import Setup

DESCRIPTION = """\
Train a model with GRPO: sparse rollouts, dense log-probs, truncated importance sampling.
"""

EPILOG = """\
A minimal file:
  run_dir = "runs/story"
  steps = 100
  [task]
  name = "story"

sparrow train --defaults prints a file of all settings, with what they mean and where their default
values come from.

On SIGTERM and Ctrl-C the run writes a checkpoint and ends. --resume continues from the newest
checkpoint, after kill -9 too. metrics.jsonl in run_dir has a row per step and one per evaluation;
tensorboard --logdir RUN_DIR shows the same metrics.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, nargs="?", metavar="CONFIG.toml", help="the run's settings")
    override = "override a setting of the file, such as optimizer.lr=3e-6; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=override)
    flags = {
        "--resume": "continue from the newest checkpoint in run_dir",
        "--defaults": "print a file that explains all settings, and exit",
        "--check": "check the settings, and exit",
    }
    for flag, what in flags.items():
        add(flag, action="store_true", help=what)


def run(args: argparse.Namespace) -> int:
    """Train. Raises `InputError` or `ScheduleError`."""
    if args.defaults:
        print(commented_defaults(), end="")
        return 0
    if args.config is None:
        raise InputError("CONFIG.toml is missing; sparrow train --defaults prints one")
    config = TrainConfig.load(args.config, args.settings)
    check_settings(config)
    require_reachable(config.model.path, "model.path")
    if args.check:
        return _check(config, args)
    try:
        return _train(config, args)
    except KeyboardInterrupt:
        return _print_state(config, "stopped", 130)


def _check(config: TrainConfig, args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from sparrow_sglang.rl.runs.checkpoint import Checkpoints
    from sparrow_sglang.rl.runs.setup import check

    logging.disable_progress_bar()
    setup = check(config)
    notes = [*setup.notes, *_check_engine(setup)]
    checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep)
    checkpoints.starting_point(config, args.resume, setup.fingerprint)
    print("\n".join(["the settings can be run", *notes]))
    return 0


def _check_engine(setup: "Setup") -> list[str]:
    """Have SGLang resolve the arguments of the engine; what lossless rollouts draft with them.
    Raises `InputError`."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sparrow_sglang.plugin.arguments.server_args import resolve_schedule
    from sparrow_sglang.plugin.lossless.mode import mode_of
    from sparrow_sglang.rl.engines.local_engine import engine_args

    load_plugins()
    defaults = engine_args(setup.model_path, setup.engine.schedule)
    try:
        arguments = ServerArgs(**defaults | setup.engine.server_args)
        resolve(arguments)
        arguments.check_server_args()
    except Exception as error:  # SGLang raises anything, ImportError for a device among them
        raise InputError(f"engine.server_args: {error or 'SGLang refuses them'}") from None
    view = resolved(arguments)
    if not mode_of(view).is_dense:
        return []
    hf_config = read_model_config(arguments).hf_config
    schedule = resolve_schedule(arguments, hf_config)
    return [f"rollouts: {mode_of(view).describe(view, schedule, hf_config)}"]


def _train(config: TrainConfig, args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from sparrow_sglang.rl.learner import TrainersLost
    from sparrow_sglang.rl.rollout import EngineDied, RolloutError
    from sparrow_sglang.rl.runs.run import Stopped
    from sparrow_sglang.rl.tasks.rewards import RewardsFailed
    from sparrow_sglang.rl.trainer import train

    logging.disable_progress_bar()
    try:
        folder = train(config, args.resume)
    except (
        *(EngineDied, RolloutError, RewardsFailed, TrainersLost, FloatingPointError),
        OSError,  # such as a full disk
    ) as error:
        return _print_state(config, f"error: {error}", 1)
    except Stopped as stop:
        return _print_state(config, "stopped", int(stop.code or 0))
    print(f"trained: {folder / 'model' if folder else config.run_dir}")
    return 0


def _print_state(config: TrainConfig, why: str, code: int) -> int:
    from sparrow_sglang.rl.runs.run import newest_checkpoint

    checkpoint = newest_checkpoint(config.run_dir)
    metrics = config.run_dir / METRICS_FILE
    if checkpoint:
        state = f"the newest checkpoint is {checkpoint}; go on with --resume"
    elif metrics.exists() and metrics.stat().st_size:
        state = "no checkpoint was saved; --resume begins again, or use another run_dir"
    else:
        state = "no step was completed and nothing was saved; start again with the same command"
    print(f"sparrow train: {why}\n{state}", file=sys.stderr)
    return code
