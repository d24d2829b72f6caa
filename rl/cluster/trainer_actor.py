"""One trainer worker as a Ray actor: a `Learner` with a shard of the policy on one GPU."""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist

from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.cluster.ray_session import use_network_of_ray
from sparrow_sglang.rl.cluster.weight_broadcast import LIMIT_S, WeightBroadcast, listen
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.distill import ADAPTER
from sparrow_sglang.rl.engines.buckets import pack, serialized
from sparrow_sglang.rl.engines.processes import EngineDied
from sparrow_sglang.rl.learner import Learner
from sparrow_sglang.rl.ranks import ALONE, Ranks


class TrainerActor:
    """A rank of the trainer, the first of which answers for all."""

    def __init__(self) -> None:
        self._ranks = ALONE
        self._store: dist.TCPStore | None = None
        self._learner: Any = None
        self._batch: tuple[Any, Batch | None] = None, None
        self._broadcast: WeightBroadcast | None = None

    def place(self) -> tuple[str, str]:
        """The Ray node, and the CUDA device on it; "" without a GPU."""
        context = ray.get_runtime_context()
        return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", []))

    def listen(self, limit_s: float) -> tuple[str, int]:
        """The address at which the ranks find each other; this is the first one."""
        address = ray.util.get_node_ip_address()
        self._store = listen(address, limit_s)
        return address, self._store.port

    def load(
        self,
        config: TrainConfig,
        ranks: Ranks,
        address: tuple[str, int],
        limit_s: float,
        threads: int,
    ) -> torch.dtype:
        """Enter torch's default process group and load the model; returns the dtype that weights
        are served in.

        Every collective has the time limit. `threads` are for work on the CPU, which an offloaded
        optimizer has much of.
        """
        # Ray gives an actor without CPUs of its own a single one.
        torch.set_num_threads(threads)
        use_network_of_ray()
        limit = timedelta(seconds=limit_s)
        if ranks.world > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            store = self._store or dist.TCPStore(*address, is_master=False, timeout=limit)
            dist.init_process_group(
                backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=limit
            )
        self._ranks, self._learner = ranks, Learner.load(config, ranks)
        return self._learner.compute_dtype

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call that method of the learner, or of this actor if it has one, on all ranks."""
        owner = self if hasattr(self, method) else self._learner
        result = getattr(owner, method)(*map(self._fetched, arguments))
        return result if self._ranks.rank == 0 else None

    def _fetched(self, argument: Any) -> Any:
        """A batch is passed by reference, as several calls are about it."""
        if not isinstance(argument, ray.ObjectRef):
            return argument
        if self._batch[0] != argument:
            self._batch = argument, ray.get(argument)
        return self._batch[1]

    def free_memory(self) -> None:
        """Give memory that PyTorch's allocator keeps cached to an engine on the same device."""
        if torch.cuda.is_available():
            # Memory that an engine has read is kept until the allocator is told to look.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def send(
        self,
        actors: Mapping[int, Any],
        gpus: int,
        colocated: bool,
        dtype: torch.dtype,
        version: str,
        adapted: bool,
    ) -> str | None:
        """Send the weights to engines of `gpus` GPUs each, in their `dtype`; see `Learner.deliver`.

        Raises `EngineDied` if an engine does not take them.
        """
        failure: Exception | None = None
        for bucket in pack(self._learner.weights(adapted), dtype):
            # Iterated to the end in any case: all ranks gather each tensor together.
            if failure is not None:
                continue
            if colocated:
                failure = self._share(actors, gpus, bucket, version)
            elif self._ranks.rank == 0:
                broadcast = self._broadcast = self._broadcast or WeightBroadcast(gpus)
                failure = _failure_of(partial(broadcast.send, actors, bucket, version))
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
            failure = _failure_of(lambda: ray.get(calls, timeout=LIMIT_S))
        if failure is not None:
            raise failure
        return ADAPTER if adapter is not None else None

    def _share(
        self, actors: Mapping[int, Any], gpus: int, bucket: Any, version: str
    ) -> Exception | None:
        """Have engines on the same GPUs read the bucket where it is; returns why that failed.

        Each rank of an engine reads from the trainer on its GPU. Only handles of the memory travel.
        """
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        if bucket.get_flattened_tensor().is_cuda:
            # Names devices by their ids, as each process numbers those that it sees.
            monkey_patch_torch_reductions()
        else:
            # Descriptors of files could be passed to children of this process only.
            torch.multiprocessing.set_sharing_strategy("file_system")
        handles = self._ranks.each(serialized(bucket))
        slot, index = divmod(self._ranks.rank, gpus)
        failure = None
        if index == 0 and slot in actors:
            parts = handles[slot * gpus : (slot + 1) * gpus]
            call = actors[slot].call.remote("load_parts", parts, version)
            failure = _failure_of(lambda: ray.get(call, timeout=LIMIT_S))
        # All wait here, as the memory must stay until it has been read.
        return next((one for one in self._ranks.each(failure) if one is not None), None)


def _failure_of(work: Any) -> Exception | None:
    """Why `work()` failed, in a form that other processes can read."""
    try:
        work()
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, Exception) else error
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        return EngineDied(f"an engine did not take the weights: {error}")
    except Exception as error:
        return error
    return None
