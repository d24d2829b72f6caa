"""Launch shapes of the select kernel, and the memory that its programs share."""

from typing import NamedTuple

import torch
import triton

from sparrow_sglang.attention_backends.kernels.checks import MAX_PAGES, sm_count

# Two programs an SM, with three tiles each in flight, cover the latency of gathered landmarks.
_PROGRAMS_PER_SM = 2
# int4 landmarks of a tile, by the largest head dimension for which registers hold that many. With
# eight landmarks a page a tile has twice as many: in a tile of fewer pages, the landmarks of a page
# would be compared across warps.
_INT4_TILES = {128: 256, 256: 64}
_PER_PAGE = 4
# Triton divides the stages between a tile and the page ids loaded before it: with fewer than five,
# the load of a tile is issued only when the previous tile has been scored.
_INT4_STAGES = 5


class SelectScratch(NamedTuple):
    """keys: [rows, max_pages] int32, any content; arrivals: [rows] int32, zero between launches."""

    keys: torch.Tensor
    arrivals: torch.Tensor


class SelectLaunch(NamedTuple):
    """Launch shape, fixed at capture.

    splits: programs that score one (request, KV head); block_pages: pages a tile;
    radix: thresholds tried in one pass of the search; stages: landmark tiles in flight.
    """

    splits: int
    block_pages: int
    num_warps: int = 4
    stages: int = 3
    radix: int = 4


def select_launch(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_pages: int,
    device: torch.device,
    int4_landmarks: int = 0,
) -> SelectLaunch:
    """One wave of programs: long rows are split, many rows get smaller tiles instead.

    Args:
        int4_landmarks: int4 landmarks of a page; 0 for one mean in 16 bits.
    """
    rows = batch * num_kv_heads
    slots = _PROGRAMS_PER_SM * sm_count(device)
    if int4_landmarks:
        tile = next(tile for dim, tile in _INT4_TILES.items() if head_dim <= dim)
        block_pages = tile // min(int4_landmarks, _PER_PAGE)
        splits = max(1, min(slots // rows, triton.cdiv(max_pages, block_pages)))
        return SelectLaunch(splits=splits, block_pages=block_pages, stages=_INT4_STAGES)
    if rows > slots:
        return SelectLaunch(splits=1, block_pages=max(16, 8192 // triton.next_power_of_2(head_dim)))
    block_pages = max(16, 16384 // triton.next_power_of_2(head_dim))
    return SelectLaunch(
        splits=min(slots // rows, triton.cdiv(max_pages, block_pages)), block_pages=block_pages
    )


def allocate_select_scratch(
    max_batch: int, num_kv_heads: int, max_pages: int, device: torch.device
) -> SelectScratch:
    """Scratch for up to max_batch requests; every layer and every batch size may share it."""
    rows = max_batch * num_kv_heads
    # Rows of whole 16-byte vectors keep the key loads wide.
    width = triton.cdiv(max_pages, 16) * 16
    return SelectScratch(
        keys=torch.empty(rows, width, dtype=torch.int32, device=device),
        arrivals=torch.zeros(rows, dtype=torch.int32, device=device),
    )


def check_scratch(scratch: SelectScratch, rows: int, max_pages: int) -> None:
    if max_pages > min(MAX_PAGES, scratch.keys.shape[1]):
        raise ValueError(
            f"page_table has {max_pages} columns: expected at most {MAX_PAGES}, and the scratch "
            f"holds {scratch.keys.shape[1]}; allocate it with max_pages={max_pages}"
        )
    if scratch.arrivals.shape[0] < rows:
        raise ValueError(
            f"scratch holds {scratch.arrivals.shape[0]} rows: expected at least bs·Hkv={rows}; "
            "allocate it with a larger max_batch"
        )
