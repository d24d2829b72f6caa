"""One rollout engine as a Ray actor."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray
import torch

from sparrow_sglang.rl.cluster.ray_session import use_network_of_ray
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.engines.responses import POLL_S
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group

CONTROL = "control"
"""Concurrency group of the methods that an actor runs while it streams."""

Groups = Sequence[tuple[int, Group]]
"""Groups with their positions in the rollout of all engines."""


class EngineActor:
    """A `LocalEngine` in a process of its own.

    It wraps the engine instead of inheriting from it: Ray runs an actor class with coroutines in an
    event loop, and the engine has an event loop already.
    """

    def __init__(
        self,
        start: Callable[..., LocalEngine],
        model_path: str,
        schedule: str,
        server_args: dict[str, Any],
    ) -> None:
        use_network_of_ray()
        self._engine = start(model_path, schedule, **server_args)
        self._inboxes: defaultdict[int, SimpleQueue[Groups]] = defaultdict(SimpleQueue)
        self._stopped = 0

    @ray.method(concurrency_group=CONTROL)
    def ready(self) -> torch.dtype:
        """The engine's dtype, once it serves; answered while another call is under way, too."""
        return self._engine.dtype

    def stream(self, sampling: Sampling, rollout: int) -> Iterator[tuple[int, Group]]:
        """The groups that `add` gives to rollout number `rollout`, until `stop` ends it."""
        positions: list[int] = []
        inbox = self._inboxes[rollout]

        def more_groups(idle: bool) -> list[Group]:
            received: list[Groups] = []
            while idle and not received:
                self._engine.require_alive()
                with suppress(Empty):
                    received.append(inbox.get(timeout=POLL_S))
            while not inbox.empty():
                received.append(inbox.get())
            added = [numbered for groups in received for numbered in groups]
            positions.extend(position for position, _ in added)
            return [group for _, group in added]

        def should_stop() -> bool:
            return self._stopped >= rollout

        for place, group in self._engine.stream([], sampling, None, more_groups, should_stop):
            yield positions[place], group
        del self._inboxes[rollout]

    @ray.method(concurrency_group=CONTROL)
    def add(self, rollout: int, groups: Groups) -> None:
        """Start groups; this runs in another thread than `stream`."""
        self._inboxes[rollout].put(groups)

    @ray.method(concurrency_group=CONTROL)
    def stop(self, rollout: int) -> None:
        """End the stream of that rollout; unfinished groups are streamed as they are."""
        self._stopped = rollout
        # Wakes a stream that waits for groups.
        self._inboxes[rollout].put(())

    def call(self, method: str, *arguments: Any) -> Any:
        """Call that method of the engine."""
        return getattr(self._engine, method)(*arguments)
