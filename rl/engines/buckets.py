"""Weights on their way to an engine: many tensors packed into few buffers of bounded size.

In: named tensors, as a model has them. Out: buckets, which SGLang takes by shared memory, CUDA IPC
or broadcast and loads as it loads a checkpoint.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

BUCKET_BYTES = 512 * 2**20
"""Largest size of a bucket; a tensor that is larger has a bucket to itself."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tensors of one dtype, concatenated.

    `data` is uint8 [sum of all tensors' bytes]. One dtype per bucket keeps every tensor aligned.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    data: torch.Tensor

    def layout(self) -> "Bucket":
        """The same names, shapes and dtype without the data."""
        return replace(self, data=torch.empty(0))

    def flattened(self) -> dict[str, Any]:
        """The bucket in the form that SGLang's load format "flattened_bucket" expects."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        metadata, start = [], 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = math.prod(shape) * self.dtype.itemsize
            metadata.append(
                FlattenedTensorMetadata(
                    name=name,
                    shape=torch.Size(shape),
                    dtype=self.dtype,
                    start_idx=start,
                    end_idx=start + size,
                    numel=size,
                )
            )
            start += size
        return {"flattened_tensor": self.data, "metadata": metadata}


def pack(
    tensors: NamedTensors, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Copies of all tensors in their order, on their device; one bucket is alive at a time.

    Floating-point tensors are rounded to `dtype` if it is given: an engine that computes in this
    dtype would round them the same way, and fp32 would take twice the bytes.
    """
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if waiting and (tensor.dtype != waiting[0][1].dtype or size + tensor.nbytes > bucket_bytes):
            yield _bucket(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += tensor.nbytes
    if waiting:
        yield _bucket(waiting)


def _bucket(tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        dtype=tensors[0][1].dtype,
        data=torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors]),
    )
