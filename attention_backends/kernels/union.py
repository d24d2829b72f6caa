"""Exact top-k of several rows of a request at once, as device functions for the select kernel.

In: the keys of each row's scored pages in global memory. Out: the union of the rows' pages in
ascending logical order. An entry holds the physical page in its low PAGE_BITS bits, and above them
one bit for each row that selected the page.
"""

import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernels.topk import (
    finite_scores,
    load_keys,
    normal_cut,
    order_keys,
)

# 2**27 pages of 16 tokens are more than any KV pool holds, and four rows leave the sign bit alone.
PAGE_BITS = tl.constexpr(27)
PAGE_MASK = tl.constexpr((1 << 27) - 1)


@triton.jit
def _find_thresholds(
    keys: tl.tensor,
    keys_stride: tl.tensor,
    first: tl.tensor,
    ends: tl.tensor,
    wanted: tl.tensor,
    RADIX: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """As `topk._find_threshold`, of ROWS rows side by side: one reduction counts for all of them.

    Returns the brackets [low, high) of each row, the keys from `low` up and those above it.
    """
    ladder = tl.arange(0, RADIX)[None, :]
    lane = tl.arange(0, CHUNK)[None, :]
    row_keys = keys + tl.arange(0, ROWS)[:, None] * keys_stride
    last = tl.max(ends, axis=0)
    resident = load_keys(row_keys, lane, first, ends[:, None])
    # A row that wants no key has the empty bracket above all of them.
    low = tl.where(wanted > 0, 1, 0xFFFFFFFF).to(tl.uint32)
    high = tl.full((ROWS,), 0xFFFFFFFF, tl.uint32)
    from_low = tl.where(wanted > 0, ends - first, 0)
    from_high = from_low * 0
    share = wanted / tl.maximum(from_low, 1)
    found = finite_scores(resident)
    number = tl.maximum(tl.minimum(ends, CHUNK) - first, 1)
    centre, deviation = normal_cut(
        tl.sum(found, axis=1) / number, tl.sum(found * found, axis=1) / number, share
    )
    low_value = centre - 6.0 * deviation
    high_value = centre + 6.0 * deviation
    spread = 0.3 * deviation
    offset = (2 * ladder - (RADIX - 1)) / (RADIX - 1)
    passes = last * 0
    while tl.max(((from_low != wanted) & (high - low > 1)).to(tl.int32), axis=0) > 0:
        values = centre[:, None] + spread[:, None] * offset
        cuts = order_keys(values).to(tl.uint32, bitcast=True)
        if passes >= 3:
            step = tl.maximum((high - low) // (RADIX + 1), 1)
            cuts = low[:, None] + step[:, None] * (ladder + 1).to(tl.uint32)
        cuts = tl.minimum(tl.maximum(cuts, low[:, None] + 1), high[:, None] - 1)
        counts = tl.sum((resident[:, None, :] >= cuts[:, :, None]).to(tl.int32), axis=2)
        for base in range(CHUNK, last, CHUNK):
            more = load_keys(row_keys, base + lane, first, ends[:, None])
            counts += tl.sum((more[:, None, :] >= cuts[:, :, None]).to(tl.int32), axis=2)
        enough = counts >= wanted[:, None]
        from_low = tl.minimum(from_low, tl.min(tl.where(enough, counts, 0x7FFFFFFF), axis=1))
        from_high = tl.maximum(from_high, tl.max(tl.where(enough, 0, counts), axis=1))
        low = tl.maximum(low, tl.max(tl.where(enough, cuts, 0), axis=1))
        high = tl.minimum(high, tl.min(tl.where(enough, 0xFFFFFFFF, cuts), axis=1))
        low_value = tl.maximum(low_value, tl.max(tl.where(enough, values, float("-inf")), axis=1))
        high_value = tl.minimum(high_value, tl.min(tl.where(enough, float("inf"), values), axis=1))
        inside = tl.maximum(from_low - from_high, 1)
        below = (from_low - wanted + 0.5) / inside
        width = high_value - low_value
        centre = low_value + width * below
        spread = 1.5 * width * tl.sqrt(tl.maximum(below * (1.0 - below), 0.0) / inside)
        passes += 1
    return low, high, from_low, from_high


@triton.jit
def store_union(
    keys: tl.tensor,
    keys_stride: tl.tensor,
    pages: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    num_selected: tl.tensor,
    most_pages: tl.tensor,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    RADIX: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Write the union of the pages that the rows keep; returns how many there are.

    num_pages, num_selected: [ROWS]; most_pages: the pages of the longest row.
    """
    first = most_pages * 0 + SINK_PAGES
    ends = num_pages - RECENT_PAGES
    wanted = num_selected - SINK_PAGES - RECENT_PAGES
    low, high, from_low, above = _find_thresholds(
        keys, keys_stride, first, ends, wanted, RADIX, ROWS, CHUNK
    )
    # Keys inside the bracket tie (or are all wanted): the first of them fill up the budget.
    room = wanted - above
    has_ties = tl.max((from_low != wanted).to(tl.int32), axis=0) > 0
    row = tl.arange(0, ROWS)[:, None]
    ties = above * 0
    count = most_pages * 0
    # As many keys as registers hold beside what is computed from them.
    STORED: tl.constexpr = min(CHUNK, 4096 // ROWS)
    for base in range(0, most_pages, STORED):
        lane = base + tl.arange(0, STORED)
        index = lane[None, :]
        page = tl.load(pages + lane, mask=lane < most_pages, other=0)
        key = load_keys(keys + row * keys_stride, index, first, ends[:, None])
        always = (index < SINK_PAGES) | ((index >= ends[:, None]) & (index < num_pages[:, None]))
        keep = (always | (key >= low[:, None])).to(tl.int32)
        if has_ties:
            tied = ((key >= low[:, None]) & (key < high[:, None])).to(tl.int32)
            before = tl.cumsum(tied, axis=1) - tied + ties[:, None]
            keep = tl.where(before < room[:, None], keep, keep - tied)
            ties += tl.sum(tied, axis=1)
        bits = tl.sum(keep << row, axis=0)
        kept = (bits != 0).to(tl.int32)
        slot = count + tl.cumsum(kept, axis=0) - kept
        tl.store(selected + slot, page | (bits << PAGE_BITS), mask=bits != 0)
        count += tl.sum(kept, axis=0)
    return count
