"""Attention of late positions over selected pages, one bit per KV head, position and page."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Size of the blocks of queries and of keys that FlexAttention computes or skips as a whole."""
_WORD = 32
# The kernel keeps its tile of the selection in shared memory three times over, beside keys and
# values. Inductor does not count it, and its tiles of 128 x 128 for heads of 64 exceed an H200.
_SMALL_HEAD_DIM = 64
_SMALL_HEAD_TILES: Any = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64}


def attend_by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of late positions over their selected pages: [S, Hq, R, D] of `query` [S, Hq, R,
    D], `key` and `value` [S, Hkv, T, D]. Differentiable on a GPU; compiled at the first call."""
    for tensor in (query, key, value):
        _lengths_vary(tensor, 0, 2)
    attend = _compiled() if query.is_cuda else flex_attention
    tiles = _SMALL_HEAD_TILES if query.is_cuda and query.shape[3] <= _SMALL_HEAD_DIM else None
    out = attend(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=True, kernel_options=tiles
    )
    assert isinstance(out, torch.Tensor), "no log-sum-exp was requested"
    return out


def block_mask(
    selection: Iterator[torch.Tensor],
    positions: torch.Tensor,
    length: int,
    page_size: int,
    group: int,
) -> BlockMask:
    """The mask of `attend_by_blocks` for `group` query heads per KV head and `length` keys.
    `positions` [S, R] are those of the queries, in order; after a sequence's last one they are
    padding, whose attention is arbitrary. `selection` gives the rows of all queries, as bool chunks
    [S, Hkv, rows, pages] of a multiple of BLOCK rows except for the last. Within its pages a
    position attends up to itself. `page_size` must be a power of two."""
    blocks = -(-length // BLOCK)
    # At least two words, as torch compiles a kernel of its own for a dimension of size 1.
    words = max(2, -(-length // (page_size * _WORD)))
    bits, touched = [], []
    for chunk in selection:
        pages = F.pad(chunk, (0, blocks * BLOCK // page_size - chunk.shape[-1]))
        tiles = F.pad(pages, (0, 0, 0, -pages.shape[2] % BLOCK))
        tiles = tiles.unflatten(2, (-1, BLOCK)).any(3)
        touched.append(tiles.unflatten(-1, (blocks, -1)).any(-1))
        bits.append(_packed(pages, words))
    packed = torch.cat(bits, dim=2)
    # A tensor, because numbers would be compiled into the kernel as constants.
    offsets = positions[:, 0].contiguous()

    # `reads` runs for every element, so it uses shifts: floor division takes several operations.
    to_page, to_word = page_size.bit_length() - 1, _WORD.bit_length() - 1

    def reads(sequence: Any, head: Any, row: Any, token: Any) -> Any:
        page = token >> to_page
        word = packed[sequence, head // group, row, page >> to_word]
        return (token <= row + offsets[sequence]) & ((word >> (page & (_WORD - 1))) & 1 == 1)

    selected = torch.cat(touched, dim=2).repeat_interleave(group, 1)
    # Blocks to visit come first, in order.
    order = selected.byte().argsort(dim=-1, descending=True, stable=True)
    mask = BlockMask.from_kv_blocks(
        selected.sum(-1, dtype=torch.int32),
        order.int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=reads,
        seq_lengths=(positions.shape[1], length),
    )
    _lengths_vary(packed, 0, 2, 3)
    _lengths_vary(offsets, 0)
    _lengths_vary(mask.kv_num_blocks, 0, 2)
    _lengths_vary(mask.kv_indices, 0, 2, 3)
    _lengths_vary(mask.q_num_blocks, 0, 2)
    _lengths_vary(mask.q_indices, 0, 2, 3)
    return mask


def _packed(selected: torch.Tensor, words: int) -> torch.Tensor:
    """bool [..., pages] as int32 [..., words]: page p is bit p % 32 of word p // 32."""
    selected = F.pad(selected, (0, words * _WORD - selected.shape[-1]))
    weights = torch.ones((), dtype=torch.int32, device=selected.device) << torch.arange(
        _WORD, dtype=torch.int32, device=selected.device
    )
    return (selected.unflatten(-1, (words, _WORD)) * weights).sum(-1, dtype=torch.int32)


@cache
def _compiled() -> Any:
    # With `fullgraph`, a failure to compile is an error; otherwise FlexAttention would silently
    # run uncompiled, and write all scores to memory.
    return torch.compile(flex_attention, fullgraph=True)


def _lengths_vary(tensor: torch.Tensor | None, *dims: int) -> None:
    """Have one compiled kernel serve all sizes of these dimensions."""
    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, dims)
