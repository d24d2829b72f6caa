"""Landmark storage: one landmark per physical KV page, sparse layer and KV head.

Landmarks are indexed by physical page. So a prefix-cache hit finds the landmarks of its pages in
place, and a page that is freed and used again gets new ones before it is scored.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


class LandmarkPool:
    """Landmarks of the sparse layers, beside SGLang's KV pool and of the same dtype.

    Args:
        layer_ids: the layers that are decoded sparsely; dense layers need no landmarks.
        num_pages: physical pages of the KV pool, the dummy page 0 included.
        num_kv_heads: KV heads on this rank.
        head_dim: dimensions of a key.
        dtype: dtype of the KV pool.
        device: device of the KV pool.
        allocation: context in which to allocate, such as SGLang's memory saver region, so that
            the landmarks are released and resumed together with the KV cache.
    """

    def __init__(
        self,
        layer_ids: Iterable[int],
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        allocation: AbstractContextManager[object] | None = None,
    ) -> None:
        shape = (num_pages, num_kv_heads, head_dim)
        with allocation or nullcontext():
            self._by_layer = {
                layer_id: torch.zeros(shape, dtype=dtype, device=device) for layer_id in layer_ids
            }

    def __contains__(self, layer_id: int) -> bool:
        return layer_id in self._by_layer

    def __getitem__(self, layer_id: int) -> torch.Tensor:
        """Landmarks of one layer, [num_pages, Hkv, D]."""
        return self._by_layer[layer_id]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The sparse layers, in ascending order."""
        return tuple(sorted(self._by_layer))

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(landmarks.nbytes for landmarks in self._by_layer.values())
