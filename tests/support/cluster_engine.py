"""An engine for actors that samples by transformers: the same responses in whatever process."""

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from sampler import Sampler

from sparrow_sglang.rl.cluster.ray_engines import RayEngines
from sparrow_sglang.rl.types import Prompt, Rollout


def pid(actor: Any) -> int:
    """The process id of a Ray actor that is not busy."""
    number: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return number


def pids(engines: RayEngines) -> dict[int, int]:
    return {slot: pid(engine.actor) for slot, engine in engines._engines.items()}


class Repeatable(Sampler):
    """Samples depend on weights, prompt and number alone."""

    dtype = torch.float32

    def _sample(self, prompt: Prompt, sample: int, *rest: Any) -> Rollout:
        torch.manual_seed(1000 * int(prompt.id) + 10 * sample + int(self.version))
        return super()._sample(prompt, sample, *rest)

    def prepare_load(self) -> None:
        self._loaded: dict[str, torch.Tensor] = {}

    def finish_load(self, version: str) -> None:
        assert self._loaded.keys() >= dict(self.model.named_parameters()).keys()
        self.update_weights(self._loaded.items(), version)

    def join(self, address: str, port: int, rank: int, world: int, group: str) -> None:
        from sglang.srt.utils import init_custom_process_group

        self._group = init_custom_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            world_size=world,
            rank=rank,
            group_name=group,
        )

    def receive(self, metadata: Sequence[Any], group: str, version: str) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(
            flattened_tensor=torch.empty(metadata[-1].end_idx, dtype=torch.uint8), metadata=metadata
        )
        dist.broadcast(bucket.get_flattened_tensor(), group=self._group, group_src=0)
        self._loaded |= dict(bucket.reconstruct_tensors())

    def load_parts(self, parts: Sequence[bytes], version: str) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for part in parts:
            bucket = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(part))
            self._loaded |= {name: part.clone() for name, part in bucket.reconstruct_tensors()}
