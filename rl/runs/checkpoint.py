"""Checkpoints: written completely or not at all, and restored bit-exactly.

A checkpoint is a folder `step-000010` with `model/`, which transformers and SGLang can load as it
is, in the dtype that the trainer computes in; `adapter/`, for PEFT and SGLang, if there is an
adapter; `training/` (the exact fp32 weights and their optimizer state, for any number of trainer
workers); `adapter.pt` (the state of the adapter and its optimizer); `random.pt` (random states);
`carried.pt` (unfinished groups), if there are any; and `state.json` (steps taken, configuration,
schedule, metrics of the last step). It is written under another name, flushed to the disk and then
renamed.
"""

import fcntl
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from sparrow_sglang.atomic_write import delete_drafts, replacing, write_json
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import cut
from sparrow_sglang.rl.config import TaskConfig, TrainConfig
from sparrow_sglang.rl.learner import Learner
from sparrow_sglang.rl.types import Group
from sparrow_sglang.run_folder import METRICS_FILE

_CARRIED = "carried.pt"
_RANDOM = "random.pt"
_NAME = re.compile(r"step-(\d{6,})")
# Sections and single keys that may differ between a checkpoint and the run that resumes it: neither
# the content of the checkpoint nor the order of the data depends on them.
_FREE = (
    "run_dir",
    "steps",
    "engine",
    "mismatch",
    "checkpoint",
    "logging",
    "evaluation",
    "algorithm.kl_coefficient",
    "model.gradient_checkpointing",
    "model.micro_batch_tokens",
    "optimizer.decay",
    "optimizer.final_lr_share",
    "optimizer.grad_clip",
    "optimizer.lr",
    "optimizer.warmup_steps",
    "rollout.max_new_tokens",
    "task.overlap_rewards",
    "task.reward_timeout_s",
    "task.reward_workers",
)


@dataclass(frozen=True)
class State:
    """The content of a checkpoint besides weights: steps taken, active schedule, metrics of the
    last step, state of the ladder of schedules, number of prompts used to replace groups, and
    groups that are carried over to the next step."""

    step: int = 0
    schedule: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    ladder: Mapping[str, Any] = field(default_factory=dict)
    replaced: int = 0
    carried: tuple[Group, ...] = ()


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Make the folder and keep other processes out of it.

    Raises `InputError` if another process trains in it, or if it cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / ".lock", "w")
    except OSError as error:
        raise InputError(
            f"run_dir={str(run_dir)!r}: cannot be written ({error.strerror or error})"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"run_dir={str(run_dir)!r}: another process is training there; stop it, or use"
                " another folder"
            ) from None
        yield


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` stay."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def newest(self) -> Path | None:
        """The checkpoint with the most steps, or None."""
        return next(reversed(self._complete()), None)

    def begin(self, config: TrainConfig, resume: bool) -> Path | None:
        """The checkpoint to resume from, None for a run that starts from the beginning.

        Raises `InputError` if the folder holds a run that is not to be resumed, or that was trained
        with other settings.
        """
        delete_drafts(self._folder)
        return self.starting_point(config, resume)

    def starting_point(self, config: TrainConfig, resume: bool) -> Path | None:
        """Returns and raises the same as `begin`, but changes nothing on the disk."""
        newest = self.newest()
        if not resume:
            # The file is empty if a run ended before its first step, e.g. by a wrong engine
            # argument.
            metrics = config.run_dir / METRICS_FILE
            if newest or (metrics.exists() and metrics.stat().st_size):
                raise InputError(
                    f"run_dir={str(config.run_dir)!r} holds a run already: resume it, with --resume"
                    " or resume=True, or use another folder"
                )
            return None
        if newest is not None:
            _check_resumable(newest, config)
        return newest

    def save(self, learner: Learner, tokenizer: Any, config: TrainConfig, state: State) -> Path:
        """Write a checkpoint, replacing one of the same step, and delete all but the newest `keep`.

        Raises `OSError` if the checkpoint cannot be written; older ones are still there then.
        """
        target = self._folder / f"step-{state.step:06d}"
        self._folder.mkdir(exist_ok=True)
        delete_drafts(self._folder)
        with replacing(target) as draft:
            learner.save(draft)
            tokenizer.save_pretrained(draft / "model")
            torch.save(_random_states(), draft / _RANDOM)
            if state.carried:
                torch.save(state.carried, draft / _CARRIED)
            fields = {
                "step": state.step,
                "schedule": state.schedule,
                "metrics": dict(state.metrics),
                "ladder": dict(state.ladder),
                "replaced": state.replaced,
                "config": config.model_dump(mode="json"),
            }
            write_json(draft / "state.json", fields)
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old)
        return target

    def restore(self, folder: Path, learner: Learner) -> State:
        """Restore weights, optimizers and the random states as they were saved."""
        with _readable(folder):
            fields = json.loads((folder / "state.json").read_text("utf-8"))
            # `weights_only=False`, as these include pickled Python objects; the files were written
            # by `save`.
            random_states = torch.load(folder / _RANDOM, weights_only=False)
            carried = folder / _CARRIED
            groups = torch.load(carried, weights_only=False) if carried.exists() else ()
            learner.restore(folder)
        _set_random_states(random_states)
        return State(
            fields["step"],
            fields["schedule"],
            fields["metrics"],
            fields["ladder"],
            fields["replaced"],
            groups,
        )

    def _complete(self) -> list[Path]:
        folders = [path for path in self._folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn any error in the block, as a damaged checkpoint may raise many, into `InputError`."""
    try:
        yield
    except (Exception, dcp.api.CheckpointException) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        raise InputError(
            f"{folder} cannot be read ({cut(reason)}): delete it to go on from the one before"
        ) from error


def _check_resumable(folder: Path, config: TrainConfig) -> None:
    with _readable(folder):
        saved = json.loads((folder / "state.json").read_text("utf-8"))["config"]
    # Settings that did not exist yet when the checkpoint was written had their defaults.
    task = TaskConfig(name=config.task.name)
    default = TrainConfig(run_dir=config.run_dir, task=task).model_dump(mode="json")
    saved = _merged(default, saved)
    for key, before, now in _differences(saved, config.model_dump(mode="json")):
        if key not in _FREE and key.split(".")[0] not in _FREE:
            raise InputError(
                f"{key}={now!r}: the run in {folder.parents[1]} was trained with {before!r}; set it"
                f" back, or use another run_dir. Free to change are {', '.join(_FREE[1:])}"
            )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above`, with missing keys filled in from `below`, recursively."""
    nested = {
        key: _merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
    }
    return {**below, **above, **nested}


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield prefix + key, old, new


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    return states | {"torch": torch.get_rng_state()}


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
