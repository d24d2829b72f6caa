"""Exact top-k over fp32 scores kept as integer keys, as device functions for the select kernel.

In: the keys of one row's scored pages in global memory (they stay in the L2 cache). Out: physical
page ids of the sinks, the best scored pages and the recent pages, in ascending logical order.
"""

import triton
import triton.language as tl


@triton.jit
def order_keys(scores: tl.tensor) -> tl.tensor:
    """int32 bits of uint32 keys that sort as the fp32 scores do, all above 0.

    A score that is not finite sorts lowest.
    """
    largest: tl.constexpr = 3.4028234663852886e38
    scores = tl.where(tl.abs(scores) <= largest, scores, -largest)
    # -0.0 and 0.0 are a tie.
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -2147483648)


@triton.jit
def _load_keys(keys: tl.tensor, index: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """uint32 keys of the scored pages [first, end); 0, below every key, elsewhere."""
    # .cg: another SM may have written them.
    bits = tl.load(
        keys + index, mask=(index >= first) & (index < end), other=0, cache_modifier=".cg"
    )
    return bits.to(tl.uint32, bitcast=True)


@triton.jit
def _find_threshold(
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    wanted: tl.tensor,
    RADIX: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Bracket [low, high) of keys that holds the wanted-th largest, and how many lie above it.

    Each pass cuts the bracket in RADIX parts and counts the keys above every cut at once: a
    block-wide reduction costs more than the compares, so several cuts share one. It stops as soon
    as the keys from `low` up are exactly the wanted ones, some 18 of the 32 bits for thousands of
    scores; only ties go down to the last bit. The first CHUNK keys stay in registers.
    """
    ladder = tl.arange(0, RADIX)
    lane = tl.arange(0, CHUNK)[None, :]
    resident = _load_keys(keys, lane, first, end)
    low = tl.full((), 1, tl.uint32)
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    from_low = end - first
    from_high = from_low * 0
    while (wanted > 0) & (from_low != wanted) & (high - low > 1):
        step = tl.maximum((high - low) // RADIX, 1)
        cuts = low + step * ladder.to(tl.uint32)
        counts = tl.sum((resident >= cuts[:, None]).to(tl.int32), axis=1)
        for base in range(CHUNK, end, CHUNK):
            more = _load_keys(keys, base + lane, first, end)
            counts += tl.sum((more >= cuts[:, None]).to(tl.int32), axis=1)
        enough = counts >= wanted
        passed = tl.sum(enough.to(tl.int32), axis=0)
        from_low = tl.min(tl.where(enough, counts, 0x7FFFFFFF), axis=0)
        from_high = tl.maximum(from_high, tl.max(tl.where(enough, 0, counts), axis=0))
        next_cut = low + step * passed.to(tl.uint32)
        low = next_cut - step
        if passed < RADIX:
            high = next_cut
    return low, high, from_high


@triton.jit
def store_selected(
    keys: tl.tensor,
    pages: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    num_selected: tl.tensor,
    SINKS: tl.constexpr,
    RECENTS: tl.constexpr,
    RADIX: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the physical ids of the kept pages in ascending logical order."""
    first = num_pages * 0 + SINKS
    end = num_pages - RECENTS
    wanted = num_selected - SINKS - RECENTS
    low, high, above = _find_threshold(keys, first, end, wanted, RADIX, CHUNK)
    # Keys inside the bracket tie (or are all wanted): the first of them fill up the budget.
    room = wanted - above
    carry = num_pages * 0
    for base in range(0, num_pages, CHUNK):
        index = base + tl.arange(0, CHUNK)
        key = _load_keys(keys, index, first, end)
        always = (index < SINKS) | ((index >= end) & (index < num_pages))
        certain = always | (key >= high)
        tied = (key >= low) & (key < high)
        # One scan carries both counts: certain pages below, tied ones in the upper half.
        packed = certain.to(tl.int32) + (tied.to(tl.int32) << 16)
        before = tl.cumsum(packed, axis=0) - packed + carry
        tied_before = before >> 16
        keep = certain | (tied & (tied_before < room))
        slot = (before & 0xFFFF) + tl.minimum(tied_before, room)
        page = tl.load(pages + index, mask=keep, other=0)
        tl.store(selected + slot, page, mask=keep)
        carry += tl.sum(packed, axis=0)
