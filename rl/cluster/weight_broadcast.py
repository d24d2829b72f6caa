"""Weights from the first trainer worker to engines: NCCL between GPUs, gloo between CPUs."""

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from sparrow_sglang.rl.rollout import EngineDied

LIMIT_S = 180.0
"""For all engines to join, and for one bucket; the first one sets up NCCL's connections."""


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
