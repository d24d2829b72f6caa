"""One trainer worker as a Ray actor: a `LocalLearner` with a shard of the policy on one GPU."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import ray
import torch
import torch.distributed as dist

from sparrow_sglang.rl.cluster.ray_session import use_network_of_ray
from sparrow_sglang.rl.cluster.weight_broadcast import LIMIT_S, WeightBroadcast, listen
from sparrow_sglang.rl.config import ClusterConfig, TrainConfig
from sparrow_sglang.rl.distill import ADAPTER
from sparrow_sglang.rl.engines.local_engine import pack, serialized
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.policy.shards import Ranks
from sparrow_sglang.rl.rollout import EngineDied


class TrainerActor:
    def __init__(self, config: TrainConfig, cluster: ClusterConfig) -> None:
        use_network_of_ray()
        self._config, self._cluster = config, cluster
        self._address = ray.util.get_node_ip_address()
        self._store = listen(self._address, cluster.collective_timeout_s)
        self._broadcast = WeightBroadcast(cluster.gpus_per_engine)
        # Several calls are about one batch.
        self._read = lru_cache(maxsize=1)(ray.get)

    def location(self) -> tuple[str, str, tuple[str, int]]:
        """Ray's node, its CUDA device ("" without a GPU), and the address for other ranks."""
        context = ray.get_runtime_context()
        devices = ",".join(context.get_accelerator_ids().get("GPU", []))
        return context.get_node_id(), devices, (self._address, self._store.port)

    def load(self, ranks: Ranks, address: tuple[str, int], threads: int) -> torch.dtype:
        """Returns the serving dtype; `threads` are for an offloaded optimizer."""
        # Ray gives an actor without CPUs of its own a single one.
        torch.set_num_threads(threads)
        limit = timedelta(seconds=self._cluster.collective_timeout_s)
        if ranks.rank > 0:
            self._store = dist.TCPStore(*address, is_master=False, timeout=limit)
        if ranks.world > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            # Every collective has the time limit.
            dist.init_process_group(
                backend, store=self._store, rank=ranks.rank, world_size=ranks.world, timeout=limit
            )
        self._ranks, self._learner = ranks, LocalLearner.load(self._config, ranks)
        return self._learner.compute_dtype

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call that method of this actor, else of the learner; references are read."""
        owner = self if hasattr(self, method) else self._learner
        values = [self._read(a) if isinstance(a, ray.ObjectRef) else a for a in arguments]
        result = getattr(owner, method)(*values)
        return result if self._ranks.rank == 0 else None

    def free_memory(self) -> None:
        """Give memory that PyTorch's allocator keeps cached to an engine on the same device."""
        if torch.cuda.is_available():
            # Memory that an engine has read is kept until the allocator is told to look.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def send(
        self, actors: Mapping[int, Any], dtype: torch.dtype, version: str, adapted: bool
    ) -> str | None:
        """See `LocalLearner.deliver`. Raises `EngineDied` if an engine fails to load them."""
        colocated = self._cluster.colocate
        failure: Exception | None = None
        for bucket in pack(self._learner.weights(adapted, dtype)):
            # Iterated to the end in any case: all ranks gather each tensor together.
            if failure is not None:
                continue
            if colocated:
                failure = self._share(actors, bucket, version)
            elif self._ranks.rank == 0:
                failure = _failure_of(partial(self._broadcast.send, actors, bucket, version))
        if colocated:
            del bucket
            self.free_memory()
        adapter = self._learner.unmerged_adapter if adapted else None
        if failure is None and adapter is not None and self._ranks.rank == 0:
            factors = {name: tensor.cpu() for name, tensor in adapter.tensors().items()}
            calls = [
                actor.call.remote("set_adapter", ADAPTER, factors, adapter.lora_config())
                for actor in actors.values()
            ]
            failure = _failure_of(partial(ray.get, calls, timeout=LIMIT_S))
        if failure is not None:
            raise failure
        return ADAPTER if adapter is not None else None

    def _share(self, actors: Mapping[int, Any], bucket: Any, version: str) -> Exception | None:
        """Each rank of a colocated engine reads the bucket from the trainer on its GPU; only
        handles travel. Returns why that failed."""
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        if bucket.get_flattened_tensor().is_cuda:
            # Names devices by their ids, as each process numbers those that it sees.
            monkey_patch_torch_reductions()
        else:
            # Descriptors of files could be passed to children of this process only.
            torch.multiprocessing.set_sharing_strategy("file_system")
        handles = self._ranks.all_gather(serialized(bucket))
        gpus = self._cluster.gpus_per_engine
        slot, index = divmod(self._ranks.rank, gpus)
        failure = None
        if index == 0 and slot in actors:
            parts = handles[slot * gpus : (slot + 1) * gpus]
            call = actors[slot].call.remote("load_parts", parts, version)
            failure = _failure_of(partial(ray.get, call, timeout=LIMIT_S))
        # All wait here, as the memory must stay until it has been read.
        return next(filter(None, self._ranks.all_gather(failure)), None)


def _failure_of(work: Callable[[], object]) -> Exception | None:
    """Why `work()` failed, in a form that other processes can read."""
    try:
        work()
    except Exception as error:
        if isinstance(error, ray.exceptions.RayTaskError):
            return error.cause if isinstance(error.cause, Exception) else error
        if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.GetTimeoutError):
            return EngineDied(f"an engine did not take the weights: {error}")
        return error
    return None
