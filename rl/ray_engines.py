"""Rollout engines on any number of machines: Ray actors with one SGLang engine each.

In: prompts, shared out among the engines, and weights. Out: groups, complete whatever dies: a dead
engine is replaced, brought to the current weights, and its unfinished groups are rolled out again.
"""

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError

from sparrow_sglang.rl.buckets import Bucket, NamedTensors, pack
from sparrow_sglang.rl.engine import EngineDied, LocalEngine
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group, Prompt
from sparrow_sglang.rl.weight_broadcast import WeightBroadcast

MAX_DEATHS = 3
"""Engines that may die in one rollout or update before the run stops: it is then no accident."""

Transfer = Literal["object_store", "broadcast"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _StoredBucket:
    """A bucket in Ray's object store, which shares NumPy arrays without copying them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    data: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class _Weights:
    version: str
    buckets: "tuple[ray.ObjectRef, ...]"


class _EngineActor:
    """A `LocalEngine` in a process of its own."""

    def __init__(self, model_path: str, schedule: str, server_args: dict[str, Any]) -> None:
        _fork_engines_on_cpu()
        arguments = {"enable_memory_saver": False} | server_args
        self._engine = LocalEngine(model_path, schedule, **arguments)

    def ready(self) -> int:
        """The actor's process id, if the engine serves."""
        self._engine.require_alive()
        return os.getpid()

    def stream(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling
    ) -> Iterator[tuple[int, Group]]:
        yield from self._engine.stream(prompts, n, sampling)

    def load(self, weights: _Weights) -> None:
        self._engine.load(map(_fetch, weights.buckets), weights.version)

    def join(self, address: str, port: int, rank: int, world: int, group: str) -> None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._engine.join(address, port, rank, world, group, backend)

    def leave(self, group: str) -> None:
        self._engine.leave(group)

    def receive(self, layout: Bucket, group: str, version: str) -> None:
        self._engine.receive(layout, group, version)

    def prepare_load(self) -> None:
        self._engine.prepare_load()

    def finish_load(self, version: str) -> None:
        self._engine.finish_load(version)


class RayEngines:
    """Any number of engines behind the interface of one.

    Uses the Ray cluster that this process is connected to, or starts one on this machine. Engines
    take whole GPUs from Ray where it has any, as many as `tp_size` x `pp_size`; the trainer's own
    GPU must not be among them, so on one machine start Ray with the others only
    (CUDA_VISIBLE_DEVICES=1,2 ray start --head).
    """

    def __init__(
        self,
        count: int,
        model_path: str,
        schedule: str = "auto",
        transfer: Transfer = "object_store",
        **server_args: Any,
    ) -> None:
        """Start `count` engines and wait until all of them serve.

        Args:
            transfer: how weights travel; "broadcast" needs GPUs that reach each other by NCCL.

        Raises:
            ValueError: Ray has fewer GPUs than the engines need.
            EngineDied: an engine did not start; the message holds its reason.
        """
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(include_dashboard=False, log_to_driver=False)
        self._start_args = (model_path, schedule, server_args)
        self._ranks = server_args.get("tp_size", 1) * server_args.get("pp_size", 1)
        self._num_gpus = _gpus_per_engine(count, self._ranks)
        self._weights: _Weights | None = None
        self._broadcast = WeightBroadcast(self._ranks) if transfer == "broadcast" else None
        self._actors = [self._start() for _ in range(count)]
        try:
            self._pids = [_await_start(actor) for actor in self._actors]
        except EngineDied:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors, each on its own machine."""
        return list(self._pids)

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Group]:
        """See `RolloutEngine`.

        Raises:
            EngineDied: engines died more than `MAX_DEATHS` times, or one could not be replaced.
            ray.exceptions.RayTaskError: an engine failed without dying, e.g. `RolloutError`.
        """
        groups: dict[int, Group] = {}
        # What each engine still owes, by position in `prompts`. Every n-th prompt, so that tasks
        # which come in blocks are spread.
        shares = {
            slot: list(range(slot, len(prompts), len(self._actors)))
            for slot in range(min(len(self._actors), len(prompts)))
        }
        streams = {self._stream(slot, shares[slot], prompts, n, sampling): slot for slot in shares}
        deaths = 0
        while streams:
            stream: Any = ray.wait(list(streams), num_returns=1, fetch_local=False)[0][0]
            slot = streams[stream]
            try:
                position, group = ray.get(next(stream))
                groups[shares[slot][position]] = group
            except StopIteration:
                del streams[stream]
            except (RayActorError, ObjectLostError, EngineDied) as error:
                del streams[stream]
                deaths += 1
                shares[slot] = [which for which in shares[slot] if which not in groups]
                self._replace(slot, deaths, error)
                if shares[slot]:
                    streams[self._stream(slot, shares[slot], prompts, n, sampling)] = slot
        return [groups[position] for position in range(len(prompts))]

    def update_weights(self, tensors: NamedTensors, version: str) -> None:
        """See `RolloutEngine`; engines that have died meanwhile are replaced.

        A copy of the weights stays in Ray's object store, for engines that are replaced later.
        """
        packed = []
        self._replace_dead()
        if self._broadcast:
            self._broadcast.start(self._actors)
        for bucket in pack(tensors):
            packed.append(ray.put(_stored(bucket)))
            if self._broadcast:
                self._broadcast.send(self._actors, bucket, version)
        self._weights = _Weights(version, tuple(packed))
        if self._broadcast:
            ray.get([actor.finish_load.remote(version) for actor in self._actors])
            return
        loads = [actor.load.remote(self._weights) for actor in self._actors]
        deaths = 0
        for slot, load in enumerate(loads):
            try:
                ray.get(load)
            except (RayActorError, EngineDied) as error:
                deaths += 1
                self._replace(slot, deaths, error)

    def release(self) -> None:
        """Does nothing: the engines share no GPU with the trainer."""

    def resume(self) -> None:
        """Does nothing, as `release`."""

    def close(self) -> None:
        """End all engines, and Ray if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._owns_ray:
            ray.shutdown()

    def _start(self) -> Any:
        # Without CPUs of its own, an actor cannot wait for ever on a small machine.
        # Any: Ray's handles are typed as if calls through them were plain attributes.
        actor: Any = ray.remote(_EngineActor).options(
            num_cpus=0, num_gpus=self._num_gpus, scheduling_strategy="SPREAD"
        )
        return actor.remote(*self._start_args)

    def _stream(
        self, slot: int, share: list[int], prompts: Sequence[Prompt], n: int, sampling: Sampling
    ) -> Any:
        own = [prompts[position] for position in share]
        method = self._actors[slot].stream.options(num_returns="streaming")
        return method.remote(own, n, sampling)

    def _replace_dead(self) -> None:
        deaths = 0
        for slot, alive in enumerate([actor.ready.remote() for actor in self._actors]):
            try:
                ray.get(alive)
            except (RayActorError, EngineDied) as error:
                deaths += 1
                self._replace(slot, deaths, error)

    def _replace(self, slot: int, deaths: int, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0]
        if deaths > MAX_DEATHS:
            raise EngineDied(
                f"{deaths} rollout engines died within one step, the last one in slot {slot}:"
                f" {reason} Look at Ray's logs of its worker for the cause."
            ) from error
        logger.warning("rollout engine %d died (%s); starting another", slot, reason)
        ray.kill(self._actors[slot])
        self._actors[slot] = self._start()
        self._pids[slot] = _await_start(self._actors[slot])
        if self._broadcast:
            self._broadcast.stop(self._actors)
        if self._weights:
            ray.get(self._actors[slot].load.remote(self._weights))


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


def _await_start(actor: Any) -> int:
    try:
        pid: int = ray.get(actor.ready.remote())
        return pid
    except RayActorError as error:
        raise EngineDied(f"a rollout engine did not start: {error}") from error


def _gpus_per_engine(count: int, ranks: int) -> int:
    available = int(ray.cluster_resources().get("GPU", 0))
    if not available and not torch.cuda.is_available():
        return 0
    if count * ranks > available:
        raise ValueError(
            f"num_engines={count} with {ranks} GPUs each: Ray has {available} GPUs; lower"
            " num_engines or tp_size, or add machines"
        )
    return ranks


def _stored(bucket: Bucket) -> _StoredBucket:
    return _StoredBucket(bucket.names, bucket.shapes, bucket.dtype, bucket.data.cpu().numpy())


def _fetch(reference: "ray.ObjectRef") -> Bucket:
    stored = ray.get(reference)
    # A copy, because the store's memory is read-only and SGLang's processes share what they get.
    return Bucket(
        stored.names, stored.shapes, stored.dtype, torch.from_numpy(np.array(stored.data))
    )
