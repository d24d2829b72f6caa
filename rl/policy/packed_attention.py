"""Full causal attention of packed sequences, and the padding that it needs.

In: queries, keys and values of packed sequences, [1, heads, T, head_dim]. Out: the same layout.
Sequences of similar length are padded and computed together, without a mask: a mask over the pack
would take T x T elements, and rule out the kernels that never write the scores to memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class Padding:
    """Spans of a pack as rows that are as wide as the longest span.

    `source` [rows, width] are the indices in the pack of the tokens that fill the rows; a span's
    last token is repeated as padding. `target` [n] are the indices of the spans' tokens in the
    flattened rows.
    """

    source: torch.Tensor
    target: torch.Tensor

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, heads, width, D] of [1, heads, T, D]."""
        rows = packed[0].index_select(1, self.source.flatten())
        return rows.unflatten(1, self.source.shape).transpose(0, 1)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[1, heads, n, D] of [rows, heads, width, D], the spans one after the other."""
        return padded.transpose(0, 1).flatten(1, 2).index_select(1, self.target)[None]


# Cached, as every layer needs the same padding, in the forward and the backward pass.
@lru_cache(maxsize=64)
def padding(spans: tuple[tuple[int, int], ...], device: torch.device) -> Padding:
    """The padding for spans (first, end) of a pack, each of at least one token."""
    lengths = [end - first for first, end in spans]
    width = max(lengths)
    column = np.arange(width)
    source = np.stack([np.minimum(first + column, end - 1) for first, end in spans])
    target = np.concatenate([row * width + np.arange(n) for row, n in enumerate(lengths)])
    return Padding(torch.as_tensor(source, device=device), torch.as_tensor(target, device=device))


def like_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Runs [first, last) of neighbours none of which is more than twice as long as another.

    Padding a sequence to the longest of its run makes its attention at most four times as costly.
    """
    runs: list[tuple[int, int]] = []
    first, shortest, longest = 0, 0, 0
    for index, length in enumerate(lengths):
        shortest, longest = min(shortest or length, length), max(longest, length)
        if longest > 2 * shortest:
            runs.append((first, index))
            first, shortest, longest = index, length, length
    return [*runs, (first, len(lengths))]


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    scaling: float | None,
) -> torch.Tensor:
    """Attention of each span (first, end) of the pack to itself, padded to the longest.

    `query` is [1, Hq, T, D], `key` and `value` [1, Hkv, T, D]; returns [1, Hq, n, D], the spans'
    tokens one after the other.
    """
    if len(spans) == 1:
        ((first, end),) = spans
        query, key, value = (tensor[:, :, first:end] for tensor in (query, key, value))
    else:
        # The padding follows a span's tokens, so causal attention hides it from them.
        rows = padding(tuple(spans), query.device)
        query, key, value = (rows.pad(tensor) for tensor in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
    )
    return out if len(spans) == 1 else rows.unpad(out)
