"""The learner of a run with `[cluster]`: the calls of `LocalLearner`, on all trainer workers."""

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.cluster.ray_engines import Actors, RayEngines
from sparrow_sglang.rl.cluster.ray_session import actor_options, ray_gpus
from sparrow_sglang.rl.cluster.trainer_actor import TrainerActor
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.rl.learner import TrainersLost
from sparrow_sglang.rl.policy.shards import Ranks
from sparrow_sglang.rl.rollout import RolloutEngine

PLACEMENT_TIMEOUT_S = 600.0
"""Time for Ray to find GPUs for all trainer workers, as after a host has disappeared."""

_GRACE_S = 30.0
"""Time for other workers to fail or end once one has failed; they may wait for it for ever."""


def _on_all_workers(method: str) -> Any:
    return lambda learner, *arguments: learner._call(method, *arguments)


class RemoteLearner:
    def __init__(self, config: TrainConfig) -> None:
        """Raises `TrainersLost` if a worker died or Ray lacks GPUs, and `InputError` if GPUs that
        colocated engines would share are on different hosts."""
        assert config.cluster is not None, "a run without [cluster] has a learner of its own"
        self._cluster = cluster = config.cluster
        self._config = config
        self._workers: list[Any] = []
        # A batch stays in Ray's object store as long as calls are about it.
        self._put = lru_cache(maxsize=1)(ray.put)
        world = cluster.trainers
        unit = {"GPU": 1.0} if ray_gpus() else {"CPU": 0.01}
        self._group: PlacementGroup = placement_group([unit] * world, strategy="PACK")
        try:
            if not self._group.wait(PLACEMENT_TIMEOUT_S):
                raise TrainersLost(
                    f"cluster.trainers={world}: no GPUs within {PLACEMENT_TIMEOUT_S:.0f} s"
                )
            options = actor_options(config.engine.server_args) | {"num_gpus": unit.get("GPU", 0)}
            # Any: Ray's handles are typed as if calls through them were plain attributes.
            kind: Any = ray.remote(**options)(TrainerActor)
            for bundle in range(world):
                strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
                worker = kind.options(scheduling_strategy=strategy).remote(config, cluster)
                self._workers.append(worker)
            locations = self._get([worker.location.remote() for worker in self._workers])
            # Neighbours in rank are on the same host, where NCCL is fastest.
            order = sorted(range(world), key=lambda index: locations[index])
            self._workers = [self._workers[index] for index in order]
            self._gpus = [locations[index][:2] for index in order]
            address, threads = locations[order[0]][2], self._threads()
            loaded = self._get(
                [
                    worker.load.remote(Ranks(rank, world), address, threads[rank])
                    for rank, worker in enumerate(self._workers)
                ]
            )
            self._dtype: torch.dtype = loaded[0]
        except BaseException:
            self.close()
            raise

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._dtype

    def open_engine(
        self, config: EngineConfig, model_path: str, defaults: Mapping[str, Any]
    ) -> RayEngines:
        gpus = self._engine_gpus() if self._cluster.colocate else []
        return RayEngines(self._cluster, config, model_path, defaults, gpus)

    device_name = _on_all_workers("device_name")
    score = _on_all_workers("score")
    acceptance = _on_all_workers("acceptance")
    update = _on_all_workers("update")
    distill = _on_all_workers("distill")
    save = _on_all_workers("save")
    restore = _on_all_workers("restore")

    def deliver(self, engine: RolloutEngine, version: str, adapted: bool) -> str | None:
        assert isinstance(engine, RayEngines), "trainers on Ray send weights to engines on Ray"
        if self._cluster.colocate:
            self._call("free_memory")
        engine.resume()

        def send(actors: Actors) -> str | None:
            sent: str | None = self._call("send", dict(actors), engine.dtype, version, adapted)
            return sent

        return engine.load(send, version)

    def close(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        remove_placement_group(self._group)

    def _threads(self) -> list[int]:
        """A fair share of its host's cores for each worker."""
        cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
        nodes = [node for node, _ in self._gpus]
        return [max(1, cores[node] // nodes.count(node)) for node in nodes]

    def _engine_gpus(self) -> list[tuple[str, str]]:
        """For each engine the node and the CUDA devices of the trainers whose GPUs it shares."""
        size, gpus = self._cluster.gpus_per_engine, []
        for first in range(0, len(self._gpus), size):
            nodes, devices = zip(*self._gpus[first : first + size], strict=True)
            if len(set(nodes)) > 1:
                raise InputError(
                    f"cluster.gpus_per_engine={size} with colocate=true: expected a divisor of the"
                    " trainers' GPUs of each host"
                )
            gpus.append((nodes[0], ",".join(devices)))
        return gpus

    def _call(self, method: str, *arguments: Any) -> Any:
        """Returns the first worker's result, once all are done."""
        # Stored once, instead of once for each worker.
        stored = ray.put([self._put(a) if isinstance(a, Batch) else a for a in arguments])
        return self._get([worker.call.remote(method, stored) for worker in self._workers])[0]

    def _get(self, calls: list[Any]) -> list[Any]:
        """The workers' results; raises what they raise, or `TrainersLost` if one has died."""
        waiting, deadline = list(calls), float("inf")
        error: RayTaskError | None = None
        while waiting:
            left = None if error is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, timeout=left)
            if not done:
                ranks = [str(rank) for rank, call in enumerate(calls) if call in waiting]
                raise TrainersLost(
                    f"a trainer worker failed, and rank {', '.join(ranks)} waits for it: {error}"
                )
            try:
                ray.get(done)
            except RayActorError as lost:
                raise TrainersLost(f"a trainer worker died: {lost}") from error or lost
            except RayTaskError as failed:
                error, deadline = error or failed, time.monotonic() + _GRACE_S
        if error is not None:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        return ray.get(calls)
