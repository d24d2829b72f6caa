"""One rollout engine as a Ray actor."""

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import ray
import torch

from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.engines.processes import EngineDied
from sparrow_sglang.rl.engines.responses import POLL_S
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group

CONTROL = "control"
"""Concurrency group of the methods that an actor runs while it streams."""

Numbered = tuple[int, Group]
"""A group with the number that the pool of engines gave it."""


class EngineActor:
    """A `LocalEngine` in a process of its own.

    It wraps the engine instead of inheriting from it: Ray runs an actor class with coroutines in an
    event loop, and the engine has an event loop already.
    """

    def __init__(
        self,
        start: Callable[[str, str, dict[str, Any]], LocalEngine],
        model_path: str,
        schedule: str,
        server_args: dict[str, Any],
    ) -> None:
        self._engine = start(model_path, schedule, server_args)
        self._inboxes: defaultdict[int, SimpleQueue[Numbered | None]] = defaultdict(SimpleQueue)
        self._stopped = 0

    def ready(self) -> tuple[int, torch.dtype]:
        """The actor's process id and the engine's dtype; raises `EngineDied` if that is dead."""
        self._engine.require_alive()
        return os.getpid(), self._engine.dtype

    def stream(self, sampling: Sampling, rollout: int) -> Iterator[Numbered]:
        """The groups that `add` gives to rollout number `rollout`, until `stop` ends it."""
        numbers: list[int] = []

        def more_groups(idle: bool) -> Sequence[Group]:
            added = self._added(rollout, wait=idle)
            numbers.extend(number for number, _ in added)
            return [group for _, group in added]

        def should_stop() -> bool:
            return self._stopped >= rollout

        for place, group in self._engine.stream([], sampling, None, more_groups, should_stop):
            yield numbers[place], group
        self._inboxes.pop(rollout, None)

    @ray.method(concurrency_group=CONTROL)
    def add(self, rollout: int, groups: Sequence[Numbered]) -> None:
        """Start groups; this runs in another thread than `stream`."""
        for group in groups:
            self._inboxes[rollout].put(group)

    @ray.method(concurrency_group=CONTROL)
    def stop(self, rollout: int) -> None:
        """End the stream of that rollout; unfinished groups are streamed as they are."""
        self._stopped = rollout
        self._inboxes[rollout].put(None)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the method of that name, of this actor if it has one, else of its engine."""
        owner = self if hasattr(self, method) else self._engine
        return getattr(owner, method)(*arguments)

    def leave(self, group: str) -> None:
        """Leave a process group, unless the engine is dead: SGLang would wait for it for ever."""
        try:
            self._engine.require_alive()
        except EngineDied:
            return
        self._engine.leave(group)

    def _added(self, rollout: int, wait: bool) -> list[Numbered]:
        """Groups added since the last call; with `wait`, at least one unless the rollout stops."""
        added: list[Numbered] = []
        while True:
            try:
                group = self._inboxes[rollout].get(wait and not added, POLL_S)
            except Empty:
                if added or not wait:
                    return added
                self._engine.require_alive()
                continue
            if group is None:
                return added
            added.append(group)


def start_engine(model_path: str, schedule: str, server_args: dict[str, Any]) -> LocalEngine:
    """A `LocalEngine` of this process."""
    if not torch.cuda.is_available():
        _fork_processes()
    return LocalEngine(model_path, schedule, **server_args)


def _fork_processes() -> None:
    """Let engines of this process start in a second instead of half a minute.

    SGLang starts its processes by spawn, and each imports SGLang anew; forked ones share what this
    process has imported. Only for processes in which torch has not computed anything yet: a forked
    child hangs in its first parallel region if the parent has started OpenMP threads.
    """
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401

    configure = engine._set_envs_and_config

    def then_fork(server_args: Any) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = then_fork
