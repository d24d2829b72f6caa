"""Weights on their way to an engine: many tensors packed into few buffers of bounded size.

In: named tensors, as a model has them. Out: buckets, which SGLang takes by shared memory, CUDA IPC
or broadcast and loads as it loads a checkpoint.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

BUCKET_BYTES = 512 * 2**20
"""Largest size of a bucket; a tensor that is larger has a bucket to itself."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def pack(tensors: NamedTensors, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Any]:
    """Copies of all tensors in their order, on their device, as SGLang's `FlattenedTensorBucket`.

    One bucket is alive at a time. The tensors of a bucket have one dtype, so that each is aligned.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if waiting and (tensor.dtype != waiting[0][1].dtype or size + tensor.nbytes > bucket_bytes):
            yield FlattenedTensorBucket(named_tensors=waiting)
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += tensor.nbytes
    if waiting:
        yield FlattenedTensorBucket(named_tensors=waiting)


def serialized(bucket: Any) -> bytes:
    """Handles of a bucket's memory for one process, in SGLang's load format "flattened_bucket"."""
    from sglang.srt.utils import MultiprocessingSerializer

    payload: bytes = MultiprocessingSerializer.serialize(
        {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    )
    return payload
