"""One rollout engine as a Ray actor, and the form in which Ray's object store holds its weights."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from sparrow_sglang.rl.engines.buckets import Bucket
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.engines.processes import EngineDied
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """References to buckets, each stored as its layout and a NumPy array, which Ray maps without
    copying it."""

    version: str
    buckets: "tuple[ray.ObjectRef, ...]"


CONTROL = "control"
"""Concurrency group of the methods that an actor can run while it streams."""


class EngineActor:
    """A `LocalEngine` in a process of its own.

    It wraps the engine instead of inheriting from it: Ray runs an actor class with coroutines in an
    event loop, and the engine has an event loop already.
    """

    def __init__(
        self,
        model_path: str,
        schedule: str,
        server_args: dict[str, Any],
        variables: Mapping[str, str],
        modules: Sequence[str],
    ) -> None:
        """Start the engine with environment `variables`, and folders `modules` on the module path.

        A task's replies, for example, are functions of a module in one of these folders.
        """
        os.environ.update(variables)
        sys.path += [folder for folder in modules if folder not in sys.path]
        _fork_engines_on_cpu()
        arguments = {"enable_memory_saver": False} | server_args
        self._engine = LocalEngine(model_path, schedule, **arguments)
        self._stopped = 0

    def ready(self) -> tuple[int, torch.dtype]:
        """The actor's process id and the engine's dtype; raises `EngineDied` if that is dead."""
        self._engine.require_alive()
        return os.getpid(), self._engine.dtype

    def stream(
        self, groups: Sequence[Group], sampling: Sampling, rollout: int
    ) -> Iterator[tuple[int, Group]]:
        """The groups of rollout number `rollout`, until `stop` is called with the same number."""
        should_stop = partial(self._has_stopped, rollout)
        yield from self._engine.stream(groups, sampling, should_stop=should_stop)

    @ray.method(concurrency_group=CONTROL)
    def stop(self, rollout: int) -> None:
        """End the stream of that rollout; runs in another thread than all other methods."""
        self._stopped = rollout

    def _has_stopped(self, rollout: int) -> bool:
        return self._stopped == rollout

    def load_stored(self, weights: StoredWeights) -> None:
        self._engine.load(map(fetch, weights.buckets), weights.version)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the method of that name, of this actor if it has one, else of its engine."""
        owner = self if hasattr(self, method) else self._engine
        return getattr(owner, method)(*arguments)

    def leave(self, group: str) -> None:
        try:
            self._engine.require_alive()
        except EngineDied:
            # SGLang would wait for the dead process for ever. Other calls report that it died.
            return
        self._engine.leave(group)


def store(bucket: Bucket) -> "ray.ObjectRef":
    """A reference to a copy of the bucket in Ray's object store."""
    return ray.put((bucket.layout(), bucket.data.cpu().numpy()))


def fetch(reference: "ray.ObjectRef") -> Bucket:
    """What `store` stored."""
    layout, data = ray.get(reference)
    # Copied, because the store's memory is read-only, and SGLang puts tensors in shared memory.
    return replace(layout, data=torch.from_numpy(np.array(data)))


def _fork_engines_on_cpu() -> None:
    """Let engines of this process start in a second instead of half a minute, without a GPU.

    SGLang starts its processes by spawn, and each imports SGLang anew; forked ones share what this
    process has imported. Only for processes in which torch has not computed anything yet: a forked
    child hangs in its first parallel region if the parent has started OpenMP threads.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401

    configure = engine._set_envs_and_config

    def then_fork(server_args: Any) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = then_fork
