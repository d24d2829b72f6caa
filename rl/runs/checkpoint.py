"""Checkpoints: written completely or not at all, and restored bit-exactly. `step-000010` holds
`model/`, which transformers and SGLang load as it is, in the compute dtype; `adapter/`, for PEFT
and SGLang; `training/` (exact fp32 weights and optimizer state, for any number of trainer workers);
`adapter.pt` (the adapter's state); `random.pt`; and `state.json`. `best.json` beside them names the
best evaluated one."""

import dataclasses
import fcntl
import json
import os
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
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.learner import Learner, TrainersLost
from sparrow_sglang.run_folder import METRICS_FILE

_BEST = "best.json"
_RANDOM = "random.pt"
_STATE = "state.json"
# Sections and single keys that may differ between a checkpoint and the run that resumes it: neither
# the content of the checkpoint nor the order of the data, whose prompts are compared, depends on
# them.
_FREE = (
    "run_dir",
    "steps",
    "engine",
    "cluster",
    "mismatch",
    "checkpoint",
    "logging",
    "evaluation",
    "model.gradient_checkpointing",
    "model.micro_batch_tokens",
    "optimizer.decay",
    "optimizer.final_lr_share",
    "optimizer.grad_clip",
    "optimizer.lr",
    "optimizer.warmup_steps",
    "rollout.max_new_tokens",
    "rollout.timeout_s",
    "task.heldout_path",
    "task.heldout_sets",
    "task.reward_timeout_s",
    "task.rewards_timeout_s",
    "task.reward_workers",
    "task.train_path",
)
_OF_A_MIX = re.compile(r"^task\.options\.[^.]+\.")


@dataclass
class State:
    """Where a run stands besides its weights. `tokens` counts response tokens sampled; `prompts` is
    the fingerprint of the training prompts. `lowest_rewards` are those of each task, at most 0."""

    step: int = 0
    tokens: int = 0
    prompts: str = ""
    lowest_rewards: dict[str, float] = field(default_factory=dict)


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Make the folder and keep other processes out. Raises `InputError`."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        taken = isinstance(error, BlockingIOError)
        why = "another process trains there" if taken else f"cannot be written ({error.strerror})"
        raise InputError(f"run_dir={str(run_dir)!r}: {why}") from None
    with lock:
        yield


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` stay, and the best evaluated one."""

    def __init__(self, run_dir: Path, keep: int, evaluated: str = "") -> None:
        """`evaluated` is a fingerprint of what evaluations measure, "" without any: rates on other
        prompts do not compare."""
        self._folder = run_dir / "checkpoints"
        self._keep = keep
        self._evaluated = evaluated

    def newest(self) -> Path | None:
        return next(reversed(self._complete()), None)

    def best(self) -> dict[str, Any]:
        """`step` and `pass_rate` of the best evaluation so far; empty before the first."""
        path = self._folder / _BEST
        with _readable(path):
            best: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        same = self._evaluated in ("", best.get("evaluated", self._evaluated))
        return best if same else {}

    def set_best(self, step: int, pass_rate: float) -> None:
        self._folder.mkdir(exist_ok=True)
        best = {"step": step, "pass_rate": pass_rate, "evaluated": self._evaluated}
        write_json(self._folder / _BEST, best)
        self._delete_old()

    def begin(self, config: TrainConfig, resume: bool, prompts: str) -> Path | None:
        """The checkpoint to resume from, None to start from the beginning. Raises `InputError` if
        the folder holds a run that is not to be resumed, or one of other settings or other
        `prompts`."""
        delete_drafts(self._folder)
        newest = self.starting_point(config, resume, prompts)
        if newest is None:
            # What a run without any checkpoint has evaluated may have been another model.
            (self._folder / _BEST).unlink(missing_ok=True)
        return newest

    def starting_point(self, config: TrainConfig, resume: bool, prompts: str) -> Path | None:
        """`begin` without changes on the disk."""
        newest = self.newest()
        if not resume:
            # The file is empty if a run ended before its first step, e.g. by a wrong engine
            # argument.
            metrics = config.run_dir / METRICS_FILE
            if newest or (metrics.exists() and metrics.stat().st_size):
                raise InputError(
                    f"run_dir={str(config.run_dir)!r} holds a run: expected --resume, or a new one"
                )
            return None
        if newest is not None:
            _check_resumable(newest, config, prompts)
        return newest

    def save(self, learner: Learner, tokenizer: Any, config: TrainConfig, state: State) -> Path:
        """Write a checkpoint, and delete all but the newest `keep` and the best. Raises `OSError`,
        and `FloatingPointError` on a state that is not finite, and then keeps the older ones."""
        target = self._folder / f"step-{state.step:06d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        delete_drafts(self._folder)
        with replacing(target) as draft, _written(draft, target):
            learner.save(draft)
            tokenizer.save_pretrained(draft / "model")
            random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            torch.save(random_states, draft / _RANDOM)
            write_json(draft / _STATE, vars(state) | {"config": config.model_dump(mode="json")})
            _follow_umask(draft)
        self._delete_old()
        return target

    def _delete_old(self) -> None:
        best = self.best().get("step")
        for old in self._complete()[: -self._keep]:
            if step_of(old) != best:
                shutil.rmtree(old)

    def restore(self, folder: Path, learner: Learner) -> State:
        with _readable(folder):
            fields = json.loads((folder / _STATE).read_text("utf-8"))
            known = {field.name for field in dataclasses.fields(State)}
            fields = {name: value for name, value in fields.items() if name in known}
            # `weights_only=False`, as these include pickled Python objects; the files were written
            # by `save`.
            python, numpy, torch_state = torch.load(folder / _RANDOM, weights_only=False)
            state = State(**fields)
            learner.restore(folder)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
        return state

    def steps(self) -> list[int]:
        return [step_of(folder) for folder in self._complete()]

    def _complete(self) -> list[Path]:
        folders = [path for path in self._folder.glob("step-*") if path.name[5:].isdigit()]
        return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _follow_umask(folder: Path) -> None:
    """safetensors writes files that only their owner reads."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def require_space(config: TrainConfig, parameters: int) -> None:
    """Raises `InputError` if `run_dir` has no room for the next checkpoint, or is no folder."""
    if config.steps in Checkpoints(config.run_dir, config.checkpoint.keep).steps():
        return
    parents = (config.run_dir, *config.run_dir.absolute().parents)
    above = next(path for path in parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise InputError(
            f"run_dir={str(config.run_dir)!r}: {above} cannot be written; expected a folder"
        )
    free = shutil.disk_usage(above).free
    # Weights, moments and the exported weights, in fp32 at most.
    size = 16 * parameters
    if size > free:
        raise InputError(
            f"run_dir={str(config.run_dir)!r}: {free / 2**30:.1f} GiB are free there, and a"
            f" checkpoint takes {size / 2**30:.1f} GiB; expected another disk"
        )


@contextmanager
def _written(draft: Path, folder: Path) -> Iterator[None]:
    """Turn errors of the disk into `OSError`: torch raises many, none of which mentions it."""
    try:
        yield
    except (TrainersLost, FloatingPointError):
        raise
    except (Exception, dcp.api.CheckpointException) as error:
        files = [path for path in draft.rglob("*") if path.is_file()]
        last = max(files, key=os.path.getmtime, default=draft)
        free = shutil.disk_usage(draft.parent).free / 2**20
        raise OSError(
            f"{folder / last.relative_to(draft)} cannot be written ({_reason(error)};"
            f" {free:,.0f} MiB are free there)"
        ) from error


def _reason(error: BaseException) -> str:
    last = (str(error).strip().splitlines() or [""])[-1]
    return cut(f"{type(error).__name__}: {last}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error into `InputError`: a damaged checkpoint raises many kinds."""
    try:
        yield
    except (Exception, dcp.api.CheckpointException) as error:
        raise InputError(
            f"{path} cannot be read ({_reason(error)}): delete it to go on without it"
        ) from error


def _check_resumable(folder: Path, config: TrainConfig, prompts: str) -> None:
    with _readable(folder):
        state = json.loads((folder / _STATE).read_text("utf-8"))
        saved, trained_on = state["config"], state["prompts"]
    whole, chosen = config.model_dump(mode="json"), config.model_dump(exclude_defaults=True)
    for key, before, now in _differences(saved, whole, chosen):
        # The tasks of a mix read files as well.
        name = _OF_A_MIX.sub("task.", key) if config.task.name == "mix" else key
        if not any(name == free or name.startswith(f"{free}.") for free in _FREE):
            raise InputError(
                f"{key}={now!r}: expected {before!r}, as in the run in {folder.parents[1]}, or a"
                f" new run_dir. Free to change are {', '.join(_FREE[1:])}"
            )
    if prompts != trained_on:
        raise InputError(
            f"the training prompts of task {config.task.name!r} are not those of the run in"
            f" {folder.parents[1]}: restore data and chat template, or use a new run_dir"
        )


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], chosen: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Settings that differ. One that `before` lacks is newer than the run, which had its default,
    so it differs only if `chosen`; one that `now` lacks exists no more."""
    for key in {**before, **chosen}.keys() & now.keys():
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, chosen.get(key, {}), f"{prefix}{key}.")
        elif old != new:
            yield prefix + key, old, new
