"""Rollout engines on any number of hosts: Ray actors with one SGLang engine each.

In: prompts, distributed among the engines by load, and a way to send weights. Out: groups, complete
even if engines die: a dead engine is replaced, given the current weights, and its unfinished groups
are rolled out again.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from sparrow_sglang.rl.cluster.engine_actor import CONTROL, EngineActor, start_engine
from sparrow_sglang.rl.cluster.ray_session import actor_options, ray_gpus
from sparrow_sglang.rl.cluster.weight_broadcast import BroadcastTimeout
from sparrow_sglang.rl.config import ClusterConfig, EngineConfig
from sparrow_sglang.rl.engines.buckets import NamedTensors
from sparrow_sglang.rl.engines.processes import EngineDied
from sparrow_sglang.rl.engines.responses import POLL_S, MoreGroups, OnFinished, ShouldStop
from sparrow_sglang.rl.engines.rollout_engine import RolloutEngine
from sparrow_sglang.rl.learner import TrainersLost
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group
from sparrow_sglang.schedule import BudgetSchedule

START = start_engine
"""Starts the engine in each actor's process."""

MAX_DEATHS = 3
"""Engines that may die in one rollout or update, or as many as there are if these are more; if more
die, the run stops, as the cause will likely persist."""

PLACEMENT_TIMEOUT_S = 60.0
"""Time for Ray to find GPUs for an engine; without, the run goes on with the other engines."""

START_TIMEOUT_S = 1800.0
"""Time for an engine to start serving, enough for a large checkpoint on a slow disk."""

ANSWER_TIMEOUT_S = 300.0
"""Time for all engines to complete a call between rollouts; an engine that takes longer is
replaced."""

STUCK_TIMEOUT_S = 60.0
"""The same after weights did not get through: engines that then wait for one that has died would
do so for the ten minutes of NCCL, or the thirty of gloo."""

_DEATH = (RayActorError, ObjectLostError, EngineDied, GetTimeoutError)

Actors = Mapping[int, Any]
"""Actors by the numbers of their engines."""

Send = Callable[[Actors], str | None]
"""Has the trainers send their weights to engines that expect them; returns the name of the adapter
that was sent with them, if there is one."""

logger = logging.getLogger(__name__)


class RayEngines(RolloutEngine):
    """Any number of engines behind the interface of one.

    An engine has GPUs of its own, as many as `cluster.gpus_per_engine`, on one host, or those of
    trainers on the host of these: `places` are then a Ray node and its CUDA devices for each
    engine.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        engine: EngineConfig,
        model_path: str,
        defaults: Mapping[str, Any],
        places: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Start the engines and wait until all serve; `defaults` are as of `open_engine`.

        Raises `EngineDied` if an engine does not start; the message holds its reason.
        """
        self._timeout_s = cluster.rollout_timeout_s
        # All may die together, with their host or with one that they wait for in a broadcast.
        self._max_deaths = max(MAX_DEATHS, cluster.engines)
        self._gpus, self._places = cluster.gpus_per_engine, places
        arguments = {**defaults, **engine.server_args}
        arguments.setdefault("tp_size", self._gpus // arguments.get("pp_size", 1))
        if not places:
            arguments.setdefault("enable_memory_saver", False)
        self._schedule_name, self._arguments = engine.schedule, arguments
        self._model_path = model_path
        self._capacity = arguments.get("max_running_requests") or float("inf")
        self._dtype = torch.float32
        self._send: Send | None = None
        self._version = ""
        self._schedule: BudgetSchedule | None = None
        self._deaths = self._rollouts = 0
        self._actors: dict[int, Any] = {}
        self._groups: dict[int, PlacementGroup] = {}
        self._pids: dict[int, int] = {}
        try:
            for slot in range(cluster.engines):
                self._start(slot)
            self._require_some()
            for slot in self._actors:
                self._await_start(slot)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the actors, each on its own host."""
        return dict(self._pids)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the engines compute in; weights are rounded to it."""
        return self._dtype

    def stream(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        on_finished: OnFinished | None = None,
        more_groups: MoreGroups | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[tuple[int, Group]]:
        """See `RolloutEngine`; a group goes to the engine with the fewest unfinished responses.

        Raises:
            EngineDied: engines died more than `MAX_DEATHS` times, or none is left.
            ray.exceptions.RayTaskError: an engine failed without dying, e.g. `RolloutError`.
        """
        if self._send is None:
            raise RuntimeError("the engines' weights are not complete: call `load` first")
        self._deaths, self._rollouts = 0, self._rollouts + 1
        everything = list(groups)
        waiting = list(range(len(everything)))
        # Groups that each engine has been given and not returned, and when it last returned one.
        owed: dict[int, set[int]] = {}
        heard: dict[int, float] = {}
        streams: dict[int, Any] = {}
        stopped = False
        try:
            while True:
                if not stopped and should_stop is not None and should_stop():
                    stopped = True
                    self._stop_rollout()
                if not stopped and more_groups is not None:
                    added = more_groups(not waiting and not any(owed.values()))
                    waiting += range(len(everything), len(everything) + len(added))
                    everything += added
                if not stopped:
                    self._open_streams(streams, sampling, owed, heard)
                    waiting = self._assign(waiting, everything, owed, heard)
                if not (streams if stopped else any(owed.values())):
                    break
                ready, _ = ray.wait(list(streams.values()), timeout=POLL_S, fetch_local=False)
                slot = self._ready_slot(streams, ready, owed, heard)
                if slot is None:
                    continue
                try:
                    if not ready:
                        raise GetTimeoutError(f"no response within {self._timeout_s:.0f} s")
                    position, group = ray.get(next(streams[slot]))
                except StopIteration:
                    del streams[slot]
                except _DEATH as error:
                    del streams[slot], heard[slot]
                    waiting = sorted(owed.pop(slot) | set(waiting))
                    self._replace(slot, error)
                else:
                    heard[slot] = time.monotonic()
                    owed[slot].remove(position)
                    if on_finished is not None:
                        on_finished(sum(rollout.finished for rollout in group.rollouts))
                    yield position, group
            # Groups that no engine had, or one that died after it was told to stop.
            for position in sorted({*waiting, *(p for left in owed.values() for p in left)}):
                yield position, everything[position]
        finally:
            self._stop_rollout()

    def _stop_rollout(self) -> None:
        for actor in self._actors.values():
            actor.stop.remote(self._rollouts)

    def _open_streams(
        self,
        streams: dict[int, Any],
        sampling: Sampling,
        owed: dict[int, set[int]],
        heard: dict[int, float],
    ) -> None:
        """Open a stream of each engine that has none, such as one that replaces another."""
        for slot in self._actors.keys() - streams.keys():
            method = self._actors[slot].stream.options(num_returns="streaming")
            streams[slot] = method.remote(sampling, self._rollouts)
            owed[slot], heard[slot] = set(), time.monotonic()

    def _assign(
        self,
        waiting: Sequence[int],
        everything: Sequence[Group],
        owed: dict[int, set[int]],
        heard: dict[int, float],
    ) -> list[int]:
        """Give groups to engines as long as these can run them; returns the positions left over."""
        load = {slot: sum(_left(everything[p]) for p in owed[slot]) for slot in owed}
        given: dict[int, list[tuple[int, Group]]] = {slot: [] for slot in owed}
        left = list(waiting)
        while left:
            group, slot = everything[left[0]], min(load, key=lambda slot: load[slot])
            if load[slot] and load[slot] + _left(group) > self._capacity:
                break
            if not owed[slot]:
                heard[slot] = time.monotonic()
            # A group that has nothing left to sample counts, too: its engine must return it.
            load[slot] += max(1, _left(group))
            owed[slot].add(left[0])
            given[slot].append((left.pop(0), group))
        for slot, groups in given.items():
            if groups:
                self._actors[slot].add.remote(self._rollouts, groups)
        return left

    def _ready_slot(
        self,
        streams: Mapping[int, Any],
        ready: Sequence[Any],
        owed: Mapping[int, set[int]],
        heard: Mapping[int, float],
    ) -> int | None:
        """The engine whose stream is ready, or one that has owed groups for too long."""
        if ready:
            return next(slot for slot, stream in streams.items() if stream is ready[0])
        since = time.monotonic() - self._timeout_s
        return next((slot for slot in streams if owed[slot] and heard[slot] < since), None)

    def load(self, send: Send, version: str) -> str | None:
        """Have `send` send weights to all engines; later rollouts carry `version`.

        Engines that have died meanwhile, or die now, are replaced, and get the weights of `send`,
        as does an engine that replaces one in the rollouts that follow. Returns what `send` does.

        Raises:
            EngineDied: as in `stream`, or an engine does not answer in time.
        """
        self._deaths, self._send = 0, None
        while True:
            self._call_all("prepare_load")
            deaths = self._deaths
            try:
                adapter = send(self._actors)
            except (BroadcastTimeout, TrainersLost):
                # Nobody is left who could send, or engines would get stuck again.
                raise
            except (EngineDied, RuntimeError):
                self._call_all("ready", timeout_s=STUCK_TIMEOUT_S)
                if self._deaths == deaths:
                    raise
                continue
            self._call_all("finish_load", version)
            if self._deaths == deaths:
                break
        self._send, self._version = send, version
        return adapter

    def update_weights(self, tensors: NamedTensors, version: str) -> None:
        """Not of this engine: trainers send their weights themselves, see `load`."""
        raise NotImplementedError

    def set_adapter(self, name: str, tensors: Mapping[str, torch.Tensor], config: Any) -> None:
        """Not of this engine, as `update_weights`."""
        raise NotImplementedError

    def set_schedule(self, schedule: BudgetSchedule) -> None:
        """See `RolloutEngine`; a replaced engine gets the schedule too."""
        self._deaths = 0
        self._schedule = schedule
        self._call_all("set_schedule", schedule)

    def release(self) -> None:
        """See `RolloutEngine`; does nothing for engines that share no GPU with a trainer."""
        if self._places:
            self._deaths = 0
            self._call_all("release")

    def resume(self) -> None:
        """See `RolloutEngine`."""
        if self._places:
            self._deaths = 0
            self._call_all("resume")

    def close(self) -> None:
        """End all engines."""
        for slot in list(self._actors):
            self._end(slot)

    def _start(self, slot: int) -> None:
        """Start an engine; none if Ray has no GPUs for it."""
        arguments = dict(self._arguments)
        if arguments.get("random_seed") is not None:
            # With one seed, all engines would answer the same prompt with the same samples.
            arguments["random_seed"] += slot * 100_003
        variables: dict[str, str] = {}
        strategy: Any = "SPREAD"
        if self._places:
            node, devices = self._places[slot]
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            # The GPUs are those of trainers, so Ray must not choose others, or none.
            variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            variables["CUDA_VISIBLE_DEVICES"] = devices
        options = actor_options(arguments, **variables)
        if not self._places and ray_gpus():
            group = placement_group([{"GPU": self._gpus}])
            if not group.wait(PLACEMENT_TIMEOUT_S):
                remove_placement_group(group)
                logger.warning("Ray has no %d GPUs on one host for engine %d", self._gpus, slot)
                return
            self._groups[slot] = group
            strategy = PlacementGroupSchedulingStrategy(group)
            options["num_gpus"] = self._gpus
        options |= {"scheduling_strategy": strategy, "concurrency_groups": {CONTROL: 1}}
        # Any: Ray's handles are typed as if calls through them were plain attributes.
        kind: Any = ray.remote(**options)(EngineActor)
        self._actors[slot] = kind.remote(START, self._model_path, self._schedule_name, arguments)

    def _end(self, slot: int) -> None:
        # The processes of an engine that died in part would keep their GPUs.
        ray.kill(self._actors.pop(slot))
        if (group := self._groups.pop(slot, None)) is not None:
            remove_placement_group(group)

    def _require_some(self) -> None:
        if not self._actors:
            raise EngineDied(
                f"no rollout engine is left, and Ray has no {self._gpus} free GPUs on one host for"
                " another: see `ray status`"
            )

    def _call_all(self, method: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Call the method on all engines at the same time; a dead engine is replaced instead.

        The replacement gets no call: `_await_start` gives it all that the others have.
        """
        calls = {
            slot: actor.call.remote(method, *arguments) for slot, actor in self._actors.items()
        }
        deadline = time.monotonic() + timeout_s
        for slot, call in calls.items():
            try:
                ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except _DEATH as error:
                self._replace(slot, error)

    def _replace(self, slot: int, error: Exception) -> None:
        self._deaths += 1
        reason = _reason(error)
        self._end(slot)
        if self._deaths > self._max_deaths:
            raise EngineDied(
                f"{self._deaths} rollout engines died within one rollout or update, the last one in"
                f" slot {slot}: {reason} Look at Ray's logs of its worker for the cause."
            ) from error
        logger.warning("rollout engine %d died (%s); starting another", slot, reason)
        self._start(slot)
        self._require_some()
        if slot in self._actors:
            self._await_start(slot)

    def _await_start(self, slot: int) -> None:
        """Wait for the engine, and give it the weights and the schedule that the others have."""
        actor = self._actors[slot]
        try:
            self._pids[slot], self._dtype = ray.get(actor.ready.remote(), timeout=START_TIMEOUT_S)
            # During an update there is nothing to send yet: `load` sends again.
            ray.get(actor.call.remote("prepare_load"))
            if self._send is not None:
                self._send({slot: actor})
                ray.get(actor.call.remote("finish_load", self._version))
            if self._schedule is not None:
                ray.get(actor.call.remote("set_schedule", self._schedule))
        except GetTimeoutError:
            raise EngineDied(
                f"a rollout engine did not start within {START_TIMEOUT_S:.0f} s: it is still"
                " loading, or its host is not reached"
            ) from None
        except _DEATH as error:
            raise EngineDied(f"a rollout engine did not start: {error}") from error


def _left(group: Group) -> int:
    """Responses that are still to be sampled."""
    return sum(not rollout.finished for rollout in group.rollouts)


def _reason(error: Exception) -> str:
    """The cause of an engine's death, without Ray's ids and tracebacks, which come first."""
    text = str(getattr(error, "cause", error)).strip() or repr(error)
    return text.splitlines()[-1]
