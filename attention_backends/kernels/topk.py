"""Exact top-k over fp32 scores kept as integer keys, as device functions for the select kernel. The
keys of a row stay in the L2 cache; physical page ids come out in ascending logical order."""

import triton
import triton.language as tl

# A block-wide reduction costs more than the compares, so several cuts share one; eight are slower.
CUTS = tl.constexpr(4)


@triton.jit
def order_keys(scores: tl.tensor) -> tl.tensor:
    """int32 bits of uint32 keys that sort as the fp32 scores do, all above 0. A score that is not
    finite sorts lowest."""
    largest: tl.constexpr = 3.4028234663852886e38
    scores = tl.where(tl.abs(scores) <= largest, scores, -largest)
    # -0.0 and 0.0 are a tie.
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -2147483648)


@triton.jit
def _load_keys(keys: tl.tensor, index: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """uint32 keys of the scored pages [first, end); 0, below every key, elsewhere."""
    # .cg reads from L2, because another SM may have written the keys.
    bits = tl.load(
        keys + index, mask=(index >= first) & (index < end), other=0, cache_modifier=".cg"
    )
    return bits.to(tl.uint32, bitcast=True)


@triton.jit
def _values(keys: tl.tensor) -> tl.tensor:
    """The fp32 scores of these keys: the inverse of `order_keys`."""
    bits = keys.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _guess_threshold(
    keys: tl.tensor, number: tl.tensor, share: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The score that `share` of the scores would exceed if they were normal, and their deviation.
    `keys`, [1, CHUNK], holds `number` scored pages. Scores that are not finite count as 0."""
    # Scores that are not finite have key 0x00800000, elements that hold no page have 0.
    scores = tl.where(keys > 0x00800000, _values(keys), 0.0)
    # One reduction sums the scores and their squares.
    moment = tl.arange(0, 2)
    powers = tl.where(moment[:, None] == 0, scores, scores * scores)
    sums = tl.sum(powers, axis=1) / tl.maximum(number, 1)
    mean = tl.sum(tl.where(moment == 0, sums, 0.0), axis=0)
    square = tl.sum(tl.where(moment == 1, sums, 0.0), axis=0)
    deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
    # Quantile of the normal distribution to 0.003, Abramowitz and Stegun 26.2.22.
    tail = tl.maximum(tl.minimum(share, 1.0 - share), 1e-6)
    root = tl.sqrt(-2.0 * tl.log(tail))
    quantile = root - (2.30753 + 0.27061 * root) / (1.0 + root * (0.99229 + 0.04481 * root))
    return mean + tl.where(share > 0.5, -quantile, quantile) * deviation, deviation


@triton.jit
def _find_threshold(
    resident: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    wanted: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Bracket [low, high) of keys that holds the wanted-th largest, and how many lie above it. Each
    pass counts the keys above CUTS cuts at once. The first pass cuts around the threshold of a
    normal distribution, the next two around that of a uniform one inside the bracket. Later passes
    cut the bracket into equal parts, so that the search ends for any scores. It stops as soon as
    the keys from `low` up are exactly the wanted ones; only ties go down to the last bit.
    `resident`: the first CHUNK keys, [1, CHUNK], in registers."""
    ladder = tl.arange(0, CUTS)
    lane = tl.arange(0, CHUNK)[None, :]
    low = tl.full((), 1, tl.uint32)
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    from_low = end - first
    from_high = from_low * 0
    centre, deviation = _guess_threshold(
        resident, tl.minimum(end, CHUNK) - first, wanted / tl.maximum(from_low, 1)
    )
    # The bracket in scores. It only says where to cut: the keys alone decide.
    low_value = centre - 6.0 * deviation
    high_value = centre + 6.0 * deviation
    # The cuts lie evenly from centre - spread to centre + spread.
    spread = 0.3 * deviation
    offset = (2 * ladder - (CUTS - 1)) / (CUTS - 1)
    passes = from_low * 0
    while (wanted > 0) & (from_low != wanted) & (high - low > 1):
        values = centre + spread * offset
        cuts = order_keys(values).to(tl.uint32, bitcast=True)
        if passes >= 3:
            step = tl.maximum((high - low) // (CUTS + 1), 1)
            cuts = low + step * (ladder + 1).to(tl.uint32)
        cuts = tl.minimum(tl.maximum(cuts, low + 1), high - 1)
        counts = tl.sum((resident >= cuts[:, None]).to(tl.int32), axis=1)
        for base in range(CHUNK, end, CHUNK):
            more = _load_keys(keys, base + lane, first, end)
            counts += tl.sum((more >= cuts[:, None]).to(tl.int32), axis=1)
        enough = counts >= wanted
        from_low = tl.minimum(from_low, tl.min(tl.where(enough, counts, 0x7FFFFFFF), axis=0))
        from_high = tl.maximum(from_high, tl.max(tl.where(enough, 0, counts), axis=0))
        low = tl.maximum(low, tl.max(tl.where(enough, cuts, 0), axis=0))
        high = tl.minimum(high, tl.min(tl.where(enough, 0xFFFFFFFF, cuts), axis=0))
        low_value = tl.maximum(low_value, tl.max(tl.where(enough, values, float("-inf")), axis=0))
        high_value = tl.minimum(high_value, tl.min(tl.where(enough, float("inf"), values), axis=0))
        inside = tl.maximum(from_low - from_high, 1)
        below = (from_low - wanted + 0.5) / inside
        width = high_value - low_value
        centre = low_value + width * below
        # 1.5 standard deviations of that rank.
        spread = 1.5 * width * tl.sqrt(tl.maximum(below * (1.0 - below), 0.0) / inside)
        passes += 1
    return low, high, from_high


@triton.jit
def _store_chunk(
    key: tl.tensor,
    page: tl.tensor,
    index: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    end: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    room: tl.tensor,
    carry: tl.tensor,
    SINK_PAGES: tl.constexpr,
) -> tl.tensor:
    """Write the kept pages among those at `index`, [1, CHUNK]; `carry` counts those before them.
    One number holds both counts, of certain pages in its lower half and of tied ones in its upper
    half. Returns the counts of each page, whose sum is to be added to `carry`."""
    always = (index < SINK_PAGES) | ((index >= end) & (index < num_pages))
    certain = always | (key >= high)
    tied = (key >= low) & (key < high)
    packed = certain.to(tl.int32) + (tied.to(tl.int32) << 16)
    before = tl.cumsum(packed, axis=1) - packed + carry
    tied_before = before >> 16
    keep = certain | (tied & (tied_before < room))
    slot = (before & 0xFFFF) + tl.minimum(tied_before, room)
    tl.store(selected + slot, page, mask=keep)
    return packed


@triton.jit
def _store_row(
    keys: tl.tensor,
    pages: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    num_selected: tl.tensor,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """`store_selected`, with the first CHUNK pages in registers."""
    first = num_pages * 0 + SINK_PAGES
    end = num_pages - RECENT_PAGES
    wanted = num_selected - SINK_PAGES - RECENT_PAGES
    lane = tl.arange(0, CHUNK)[None, :]
    resident = _load_keys(keys, lane, first, end)
    page = tl.load(pages + lane, mask=lane < num_pages, other=0)
    low, high, above = _find_threshold(resident, keys, first, end, wanted, CHUNK)
    # Keys inside the bracket tie (or are all wanted): the first of them fill up the budget.
    room = wanted - above
    carry = num_pages * 0
    packed = _store_chunk(
        resident, page, lane, selected, num_pages, end, low, high, room, carry, SINK_PAGES
    )
    for base in range(CHUNK, num_pages, CHUNK):
        carry += tl.sum(tl.sum(packed, axis=1), axis=0)
        index = base + lane
        key = _load_keys(keys, index, first, end)
        page = tl.load(pages + index, mask=index < num_pages, other=0)
        packed = _store_chunk(
            key, page, index, selected, num_pages, end, low, high, room, carry, SINK_PAGES
        )


@triton.jit
def store_selected(
    keys: tl.tensor,
    pages: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    num_selected: tl.tensor,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the physical ids of the kept pages in ascending logical order. The tile of a short row
    is smaller than CHUNK, which makes its search faster."""
    if num_pages <= 512:
        _store_row(keys, pages, selected, num_pages, num_selected, SINK_PAGES, RECENT_PAGES, 512)
    elif num_pages <= 1024:
        _store_row(keys, pages, selected, num_pages, num_selected, SINK_PAGES, RECENT_PAGES, 1024)
    else:
        _store_row(keys, pages, selected, num_pages, num_selected, SINK_PAGES, RECENT_PAGES, CHUNK)
