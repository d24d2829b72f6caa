"""Weights from the trainer to all engines at once: NCCL between GPUs, gloo between CPUs.

In: packed weights on the trainer's device. Out: the same bucket, loaded by every engine.
"""

import socket
import uuid
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from sparrow_sglang.rl.buckets import Bucket


class WeightBroadcast:
    """The process group of the trainer, rank 0, and all engines' ranks after it."""

    def __init__(self, ranks_per_engine: int) -> None:
        self._ranks = ranks_per_engine
        self._name = ""
        self._group: Any = None

    def start(self, actors: list[ActorHandle]) -> None:
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
            world_size=world,
            rank=0,
            group_name=self._name,
        )
        ray.get(joined)

    def send(self, actors: list[ActorHandle], bucket: Bucket, version: str) -> None:
        """Broadcast one bucket; raises what the engines or the group raise."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        layout = Bucket(bucket.names, bucket.shapes, bucket.dtype, torch.empty(0))
        received = [actor.receive.remote(layout, self._name, version) for actor in actors]
        torch.distributed.broadcast(bucket.data.to(device), src=0, group=self._group)
        ray.get(received)

    def stop(self, actors: list[ActorHandle]) -> None:
        """Give up the group, since an engine of it is gone; `start` makes another."""
        if self._group is None:
            return
        torch.distributed.destroy_process_group(self._group)
        self._group = None
        for actor in actors:
            actor.leave.remote(self._name)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        port: int = server.getsockname()[1]
        return port
