"""Scores of pages by int4 landmarks, as device functions for the select kernel."""

import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernels.common import INTERPRETED, pair_columns
from sparrow_sglang.attention_backends.kernels.topk import order_keys


@triton.jit
def _unpack(codes: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Both codes of each byte in int8: the lower four bits as 8 + code, the upper as 16 * code."""
    if INTERPRETED:
        return (codes & 15).to(tl.int8), ((codes & 240) ^ 128).to(tl.int8, bitcast=True)
    else:
        # This unpacks four bytes at once; the compiler would split them and pack them again.
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;",
            "=r,=r,r",
            [codes],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def query_digits(
    q_group: tl.tensor, GROUP: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The group's queries as int8 digits [channels, COLUMNS], what the sums of codes times digits
    start from, and the units of two digits each, [COLUMNS / 2]. Channels are the first members of
    all pairs, then the second ones, each with padding behind them. A query becomes a fixed-point
    number of 31 bits, or 27 in second members, at the exponent of its largest channel, in four
    digits: columns 4h to 4h + 3 hold those of query h. The unit of a query that is not finite is
    not a number."""
    WIDTH: tl.constexpr = pair_columns(D).shape[0]
    index = tl.arange(0, 2 * WIDTH)
    member, pair = index // WIDTH, index % WIDTH
    channel = pair + member * (D // 2)
    # Padding columns repeat heads of the group, which changes no maximum.
    of_head = (tl.arange(0, COLUMNS) // 4) % GROUP
    query = tl.load(
        q_group + of_head[None, :] * D + channel[:, None], mask=pair[:, None] < D // 2, other=0.0
    ).to(tl.float32)
    largest = tl.max(tl.abs(query), 0)
    finite = (tl.max((query != query).to(tl.int32), axis=0) == 0) & (largest < float("inf"))
    # 2**exponent in fp32 is (127 + exponent) << 23; below 30 the digits' units would be denormal.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 30)
    to_fixed = ((283 - exponent) << 23).to(tl.float32, bitcast=True)
    # Codes of second members are 16 times as large.
    share = tl.where(member == 0, 1.0, 1.0 / 16)
    fixed = (query * to_fixed[None, :] * share[:, None]).to(tl.int32)
    # The signed base-256 digit at each column's place: once 0x808080 is added, each of the three
    # lower bytes is its digit plus 128, and the highest byte is its digit in two's complement.
    place = (tl.arange(0, COLUMNS) % 4)[None, :]
    byte = ((fixed + 0x808080) >> (8 * place)) & 255
    digits = tl.where(place < 3, byte, byte ^ 128) - 128
    # First members are stored as 8 + code; starting at this offset cancels the 8.
    offset = -8 * tl.sum(tl.where(member[:, None] == 0, digits, 0), axis=0)
    # Sums of two neighbouring digits are combined as integers, so only even columns need a unit.
    unit = ((exponent - 29 + 8 * (tl.arange(0, COLUMNS) % 4)) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(finite, unit, float("nan"))
    unit, _ = tl.split(tl.reshape(unit, (COLUMNS // 2, 2)))
    return digits.to(tl.int8), offset, unit


@triton.jit
def score_int4_pages(
    digits: tl.tensor,
    offset: tl.tensor,
    unit: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    head: tl.tensor,
    pages: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LANDMARKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write the keys of pages [first, end), each of which has LANDMARKS int4 landmarks, for the
    queries that `query_digits` gives. Codes stay integers: converting 4 bits to a float costs more
    than loading them. The sums of codes times digits are exact; fp32 is used only to combine them.
    A query that is not finite counts for no page."""
    COLUMNS: tl.constexpr = digits.shape[1]
    ROWS: tl.constexpr = LANDMARKS * BLOCK
    PAIRS: tl.constexpr = D // 2
    pair = pair_columns(D)
    WIDTH: tl.constexpr = pair.shape[0]
    start_value = tl.zeros((ROWS, COLUMNS), tl.int32) + offset[None, :]
    landmark = tl.arange(0, LANDMARKS)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        # Rows past the end repeat the last page, which costs less than masking them.
        index = tl.minimum(start + tl.arange(0, BLOCK), end - 1)
        page = tl.load(pages + index).to(tl.int64)
        row = (page * HEADS + head)[:, None] * LANDMARKS + landmark[None, :]
        at = codes + row[:, :, None] * PAIRS + pair[None, None, :]
        if PAIRS == WIDTH:
            tile = tl.load(at)
        else:
            # Padding columns may hold anything: their digits are 0.
            tile = tl.load(at, mask=pair[None, None, :] < PAIRS)
        scale = tl.load(scales + row)
        # Landmarks of a page are BLOCK rows apart, so that the same thread holds them.
        tile = tl.reshape(tl.permute(tile, (1, 0, 2)), (ROWS, WIDTH))
        scale = tl.reshape(tl.permute(scale, (1, 0)), (ROWS,)).to(tl.float32)
        first_codes, second_codes = _unpack(tile)
        both = tl.permute(tl.join(first_codes, second_codes), (0, 2, 1))
        sums = tl.dot(tl.reshape(both, (ROWS, 2 * WIDTH)), digits, start_value, out_dtype=tl.int32)
        low, high = tl.split(tl.reshape(sums, (ROWS, COLUMNS // 2, 2)))
        parts = (low + 256 * high).to(tl.float32) * unit[None, :]
        product = tl.sum(tl.reshape(parts, (ROWS, COLUMNS // 4, 2)), axis=2) * scale[:, None]
        # A product that is not a number does not count, unless there is no other.
        score = tl.max(tl.reshape(product, (LANDMARKS, BLOCK, COLUMNS // 4)), axis=0)
        score = tl.max(score, axis=1)
        block_index = start + tl.arange(0, BLOCK)
        tl.store(keys + block_index, order_keys(score), mask=block_index < end)
