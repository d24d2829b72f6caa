"""Weights from the trainer to all engines at once: NCCL between GPUs, gloo between CPUs.

In: packed weights on the trainer's device. Out: the same bucket, loaded by every engine.
"""

import socket
import uuid
from datetime import timedelta
from typing import Any

import ray
import torch

from sparrow_sglang.rl.buckets import Bucket

TIMEOUT = timedelta(minutes=10)
"""For all engines to join, and for one bucket."""


class WeightBroadcast:
    """The process group of the trainer, rank 0, and all engines' ranks after it.

    If a step raises, call `stop`: an engine is gone, or the machines do not reach each other.
    """

    def __init__(self, ranks_per_engine: int) -> None:
        self._ranks = ranks_per_engine
        self._name = ""
        self._group: Any = None

    def start(self, actors: list[Any]) -> None:
        """Make the group if there is none, and have the engines expect weights."""
        from sglang.srt.utils import init_custom_process_group

        ray.get([actor.prepare_load.remote() for actor in actors])
        if self._group is not None:
            return
        self._name = f"sparrow-weights-{uuid.uuid4().hex[:8]}"
        address, port = ray.util.get_node_ip_address(), _free_port()
        world = 1 + len(actors) * self._ranks
        joined = [
            actor.join.remote(address, port, 1 + slot * self._ranks, world, self._name)
            for slot, actor in enumerate(actors)
        ]
        self._group = init_custom_process_group(
            backend="nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{address}:{port}",
            timeout=TIMEOUT,
            world_size=world,
            rank=0,
            group_name=self._name,
        )
        ray.get(joined)

    def send(self, actors: list[Any], bucket: Bucket, version: str) -> None:
        """Broadcast one bucket and wait until all engines have loaded it."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        layout = Bucket(bucket.names, bucket.shapes, bucket.dtype, torch.empty(0))
        received = [actor.receive.remote(layout, self._name, version) for actor in actors]
        data = bucket.data.to(device)
        # Not waited for first: between GPUs it would wait for an engine that is dead.
        sent = torch.distributed.broadcast(data, src=0, group=self._group, async_op=True)
        ray.get(received)
        sent.wait()

    def stop(self, actors: list[Any]) -> None:
        """Give up the group; `start` makes another."""
        if not self._name:
            return
        for actor in actors:
            actor.leave.remote(self._name)
        self._name = ""
        if self._group is not None:
            _destroy(self._group)
            self._group = None


def _destroy(group: Any) -> None:
    if torch.cuda.is_available():
        # NCCL's orderly end may wait for the ranks that are gone.
        torch.distributed.distributed_c10d._abort_process_group(group)
    else:
        torch.distributed.destroy_process_group(group)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        port: int = server.getsockname()[1]
        return port
