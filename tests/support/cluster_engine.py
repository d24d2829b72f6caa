"""An engine for actors that samples by transformers: the same responses in whatever process."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sampler import Sampler

from sparrow_sglang.rl.config import EngineConfig
from sparrow_sglang.rl.engines.buckets import Bucket
from sparrow_sglang.rl.types import Prompt, Rollout


class Repeatable(Sampler):
    """Samples depend on weights, prompt and number alone."""

    dtype = torch.float32

    def _sample(self, prompt: Prompt, sample: int, *rest: Any) -> Rollout:
        torch.manual_seed(1000 * int(prompt.id) + 10 * sample + int(self.version))
        return super()._sample(prompt, sample, *rest)

    def require_alive(self) -> None: ...

    def set_schedule(self, schedule: Any) -> None: ...

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
            # An engine that waits for one that has died answers no other call meanwhile.
            timeout=timedelta(seconds=60),
        )

    def leave(self, group: str) -> None:
        dist.destroy_process_group(self._group)

    def receive(self, layout: Bucket, group: str, version: str) -> None:
        sizes = [shape.numel() * layout.dtype.itemsize for shape in map(torch.Size, layout.shapes)]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, group=self._group, group_src=0)
        self._take(layout.names, layout.shapes, layout.dtype, data)

    def load_parts(self, parts: Sequence[bytes], version: str) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        for part in parts:
            bucket = MultiprocessingSerializer.deserialize(part)
            metadata = bucket["metadata"]
            names, shapes = [one.name for one in metadata], [one.shape for one in metadata]
            self._take(names, shapes, metadata[0].dtype, bucket["flattened_tensor"])

    def _take(self, names: Any, shapes: Any, dtype: torch.dtype, data: torch.Tensor) -> None:
        parts = data.clone().view(dtype).split([torch.Size(shape).numel() for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            self._loaded[name] = part.view(shape)


def start_repeatable(model_path: str, schedule: str, server_args: dict[str, Any]) -> Repeatable:
    return Repeatable(EngineConfig(schedule=schedule), model_path, server_args)
