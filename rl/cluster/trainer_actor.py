"""One trainer worker as a Ray actor: a `LocalLearner` with a shard of the policy on one GPU.
The first one broadcasts weights to engines: by NCCL between GPUs, gloo between CPUs."""

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import ray
import torch
import torch.distributed as dist

from sparrow_sglang.rl.cluster.ray_session import use_network_of_ray
from sparrow_sglang.rl.config import ClusterConfig, TrainConfig
from sparrow_sglang.rl.distill import ADAPTER
from sparrow_sglang.rl.engines.local_engine import pack, serialized
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.policy.shards import Ranks
from sparrow_sglang.rl.rollout import EngineDied

LIMIT_S = 180.0
"""For all engines to join, and for one bucket; the first one sets up NCCL's connections."""


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


class WeightBroadcast:
    def __init__(self, ranks_per_engine: int) -> None:
        self._ranks = ranks_per_engine
        self._name = f"sparrow-weights-{uuid.uuid4().hex[:8]}"
        self._group: Any = None

    def send(self, actors: Mapping[int, Any], bucket: Any, version: str) -> None:
        """Broadcast one bucket of `pack` until all `actors`, the same each time, have loaded it.
        Raises `EngineDied` unless they do within `LIMIT_S`; they may wait for ever then."""
        if self._group is None:
            self._group = self._joined(actors)
        received = {
            slot: actor.call.remote("receive", bucket.get_metadata(), self._name, version)
            for slot, actor in actors.items()
        }
        data, group = bucket.get_flattened_tensor(), self._group
        what = f"sending {data.nbytes / 2**20:.0f} MiB of weights by broadcast"
        _together(received, lambda: _broadcast(data, group), what)

    def _joined(self, actors: Mapping[int, Any]) -> Any:
        name, address = self._name, ray.util.get_node_ip_address()
        store = listen(address, LIMIT_S)
        port, world = store.port, 1 + len(actors) * self._ranks
        joined = {
            slot: actor.call.remote("join", address, port, 1 + index * self._ranks, world, name)
            for index, (slot, actor) in enumerate(actors.items())
        }
        what = f"joining the weight broadcast at {address}:{port}"
        return _together(joined, lambda: _join(store, world, name), what)


def listen(address: str, limit_s: float) -> dist.TCPStore:
    """The store where the ranks of a group find each other; it holds its port from now on."""
    limit = timedelta(seconds=limit_s)
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)


def _join(store: dist.TCPStore, world: int, name: str) -> Any:
    from sglang.srt.utils import init_custom_process_group

    return init_custom_process_group(
        backend="nccl" if torch.cuda.is_available() else "gloo",
        # The prefix of SGLang's ranks, which are given an address instead of a store.
        store=dist.PrefixStore(name, store),
        # Longer than the limit here, as NCCL ends this process when its own runs out.
        timeout=timedelta(seconds=2 * LIMIT_S),
        world_size=world,
        rank=0,
        group_name=name,
    )


def _broadcast(data: torch.Tensor, group: Any) -> None:
    dist.broadcast(data, group=group, group_src=0)
    if data.is_cuda:
        # The caller may reuse the memory once this returns.
        torch.cuda.current_stream(data.device).synchronize()


def _together(replies: Mapping[int, Any], call: Callable[[], Any], what: str) -> Any:
    """The result of `call()`, once all engines have replied; the first error as it arrives."""
    # In a thread, because the call would wait for an engine that has died.
    ours = _in_background(call)
    theirs = {reply.future(): f"engine {slot}" for slot, reply in replies.items()}
    done, late = wait([ours, *theirs], LIMIT_S, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if not late:
        return ours.result()
    names = [name for future, name in theirs.items() if future in late] or ["the trainer"]
    raise EngineDied(
        f"{what} took {', '.join(names)} of {len(replies)} more than {LIMIT_S:.0f} s: check ports,"
        " NCCL_SOCKET_IFNAME, and that NCCL_* variables are equal on all hosts (NCCL_DEBUG=INFO)"
    )


def _in_background(call: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sparrow-weights", daemon=True).start()
    return future
