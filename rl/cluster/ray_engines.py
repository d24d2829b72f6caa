"""Rollout engines on any number of hosts: Ray actors with one SGLang engine each."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from sparrow_sglang.rl.cluster.ray_session import actor_options, ray_gpus, use_network_of_ray
from sparrow_sglang.rl.config import ClusterConfig, EngineConfig
from sparrow_sglang.rl.engines.local_engine import POLL_S, LocalEngine
from sparrow_sglang.rl.rollout import (
    EngineDied,
    EngineNotStarted,
    RolloutEngine,
    Sampling,
)
from sparrow_sglang.rl.types import Group, Prompt

CONTROL = "control"
"""Concurrency group of the methods that an actor runs while it streams."""

Prompts = Sequence[tuple[int, Prompt]]
"""Prompts with their positions in the rollout of all engines."""


class EngineActor:
    """A `LocalEngine` in a process of its own. Wrapped, not inherited: Ray runs an actor class with
    coroutines in an event loop, and the engine has one already."""

    def __init__(
        self,
        start: Callable[..., LocalEngine],
        model_path: str,
        schedule: str,
        server_args: dict[str, Any],
    ) -> None:
        use_network_of_ray()
        self._engine = start(model_path, schedule, **server_args)
        self._stopped = 0

    @ray.method(concurrency_group=CONTROL)
    def ready(self) -> torch.dtype:
        return self._engine.dtype

    def stream(
        self, prompts: Prompts, n: int, sampling: Sampling, rollout: int
    ) -> Iterator[tuple[int, Group]]:
        """Groups of `n` samples of each prompt, unless `stop` ends this rollout before."""
        own = [prompt for _, prompt in prompts]
        groups = self._engine.stream(own, n, sampling, lambda: self._stopped >= rollout)
        for index, group in groups:
            yield prompts[index][0], group

    @ray.method(concurrency_group=CONTROL)
    def stop(self, rollout: int) -> None:
        """End the stream of that rollout; its unfinished responses are aborted."""
        self._stopped = rollout

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._engine, method)(*arguments)


START: Callable[..., LocalEngine] = LocalEngine
PLACEMENT_TIMEOUT_S = 60.0
"""Time for Ray to find GPUs for an engine; without them, the run uses the other engines."""

START_TIMEOUT_S = 1800.0
"""Time for an engine to start serving, enough for a large checkpoint on a slow disk."""

ANSWER_TIMEOUT_S = 300.0

_DEATH = (RayActorError, ObjectLostError, EngineDied, GetTimeoutError)

Actors = Mapping[int, Any]
Send = Callable[[Actors], str | None]
"""Sends the trainers' weights to engines, by number; returns the name of an adapter sent along."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Engine:
    """An engine, the stream of its finished groups, and the positions of those that it owes."""

    actor: Any
    placement: PlacementGroup | None
    stream: Any = None
    owed: set[int] = field(default_factory=set)


class RayEngines(RolloutEngine):
    """Engines behind the interface of one, each with GPUs of one host. Colocated ones share those
    of trainers: `shared_gpus` are a Ray node and its CUDA devices for each."""

    def __init__(
        self,
        cluster: ClusterConfig,
        engine: EngineConfig,
        model_path: str,
        defaults: Mapping[str, Any],
        shared_gpus: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Returns once all serve; raises `EngineNotStarted` with the reason."""
        self._gpus, self._shared_gpus = cluster.gpus_per_engine, shared_gpus
        saver = {} if shared_gpus else {"enable_memory_saver": False}
        self._arguments = {"tp_size": self._gpus, **saver, **defaults, **engine.server_args}
        self._schedule, self._model_path = engine.schedule, model_path
        self.dtype = torch.float32
        self._rollouts = 0
        self._engines: dict[int, _Engine] = {}
        try:
            for slot in range(cluster.engines):
                self._start(slot)
            self._await_start()
        except BaseException:
            self.close()
            raise

    def stream(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling
    ) -> Iterator[tuple[int, Group]]:
        """See `RolloutEngine`; engines take prompts in turn. Raises `EngineDied`, and
        `ray.exceptions.RayTaskError` if an engine failed without dying."""
        self._rollouts += 1
        numbered = list(enumerate(prompts))
        for turn, engine in enumerate(self._engines.values()):
            share = numbered[turn :: len(self._engines)]
            method = engine.actor.stream.options(num_returns="streaming")
            engine.stream = method.remote(share, n, sampling, self._rollouts)
            engine.owed = {position for position, _ in share}
        try:
            while streams := {one.stream: slot for slot, one in self._engines.items() if one.owed}:
                ready, _ = ray.wait(list(streams), timeout=POLL_S, fetch_local=False)
                if not ready:
                    continue
                slot = streams[ready[0]]
                engine = self._engines[slot]
                try:
                    position, group = ray.get(next(engine.stream))
                except _DEATH as error:
                    raise _died(slot, error) from error
                engine.owed.remove(position)
                yield position, group
        finally:
            for each in self._engines.values():
                each.actor.stop.remote(self._rollouts)

    def load(self, send: Send, version: str) -> str | None:
        """`send` sends weights to all engines, of `version`. Raises `EngineDied`."""
        self._call_all("prepare_load")
        adapter = send({slot: engine.actor for slot, engine in self._engines.items()})
        self._call_all("finish_load", version)
        return adapter

    def release(self) -> None:
        self._call_all("release")

    def resume(self) -> None:
        self._call_all("resume")

    def close(self) -> None:
        for slot in list(self._engines):
            self._end(slot)

    def _start(self, slot: int) -> None:
        arguments = dict(self._arguments)
        if arguments.get("random_seed") is not None:
            # With one seed, all engines would answer the same prompt with the same samples.
            arguments["random_seed"] += slot * 100_003
        variables: dict[str, str] = {}
        placement: PlacementGroup | None = None
        strategy: Any = "SPREAD"
        if self._shared_gpus:
            node, devices = self._shared_gpus[slot]
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            # The GPUs are those of trainers, so Ray must not choose others, or none.
            variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            variables["CUDA_VISIBLE_DEVICES"] = devices
        elif ray_gpus():
            placement = placement_group([{"GPU": self._gpus}])
            if not placement.wait(PLACEMENT_TIMEOUT_S):
                remove_placement_group(placement)
                logger.warning("Ray has no %d GPUs on one host for engine %d", self._gpus, slot)
                return
            strategy = PlacementGroupSchedulingStrategy(placement)
        options = actor_options(arguments, **variables)
        options |= {"scheduling_strategy": strategy, "concurrency_groups": {CONTROL: 1}}
        options["num_gpus"] = self._gpus if placement else 0
        # Any: Ray's handles are typed as if calls through them were plain attributes.
        kind: Any = ray.remote(**options)(EngineActor)
        actor = kind.remote(START, self._model_path, self._schedule, arguments)
        self._engines[slot] = _Engine(actor, placement)

    def _end(self, slot: int) -> None:
        # Remaining processes of an engine that died in part would keep their GPUs.
        engine = self._engines.pop(slot)
        ray.kill(engine.actor)
        if engine.placement is not None:
            remove_placement_group(engine.placement)

    def _call_all(self, method: str, *arguments: Any) -> None:
        calls = {
            slot: engine.actor.call.remote(method, *arguments)
            for slot, engine in self._engines.items()
        }
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        for slot, call in calls.items():
            try:
                ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except _DEATH as error:
                raise _died(slot, error) from error

    def _await_start(self) -> None:
        if not self._engines:
            raise EngineNotStarted(f"Ray has no {self._gpus} free GPUs on one host: see ray status")
        try:
            for engine in self._engines.values():
                self.dtype = ray.get(engine.actor.ready.remote(), timeout=START_TIMEOUT_S)
        except GetTimeoutError:
            raise EngineNotStarted(
                f"a rollout engine did not start within {START_TIMEOUT_S:.0f} s"
            ) from None
        except _DEATH as error:
            raise EngineNotStarted(f"a rollout engine did not start: {error}") from error


def _died(slot: int, error: Exception) -> EngineDied:
    """The cause of a death, without Ray's ids and tracebacks, which come first."""
    text = str(getattr(error, "cause", error)).strip() or repr(error)
    return EngineDied(f"rollout engine {slot} died: {text.splitlines()[-1]}")
