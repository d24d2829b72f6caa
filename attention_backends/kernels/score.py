"""Scores of pages by their landmarks, as device functions for the select kernel.

In: the queries of one KV head's group and landmarks in either form. Out: sortable keys of the
scores, in global memory.
"""

import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernels.heads import head_columns, head_mask, pair_columns
from sparrow_sglang.attention_backends.kernels.topk import order_keys

# The interpreter has no inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def split_query(group_query: tl.tensor, COLUMNS: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The fp32 query [D] as a [D, COLUMNS] operand of the tensor cores, exact to fp32.

    Three 16-bit numbers hold an fp32 mantissa, so the sum over the columns of a product is the
    product with the unrounded query, accumulated in fp32.
    """
    high = group_query.to(DTYPE)
    rest = group_query - high.to(tl.float32)
    middle = rest.to(DTYPE)
    low = (rest - middle.to(tl.float32)).to(DTYPE)
    column = tl.arange(0, COLUMNS)[None, :]
    split = tl.where(column == 0, high[:, None], tl.zeros_like(high)[:, None])
    split = tl.where(column == 1, middle[:, None], split)
    return tl.where(column == 2, low[:, None], split)


@triton.jit
def score_pages(
    query: tl.tensor,
    head_landmarks: tl.tensor,
    pages: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    page_stride: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write the keys of pages [first, end), each of which has one landmark of D numbers.

    `query` is the group's mean query as `split_query` gives it.
    """
    columns = head_columns(D)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        inside = index < end
        page = tl.load(pages + index, mask=inside, other=0).to(tl.int64)
        tile = tl.load(
            head_landmarks + page[:, None] * page_stride + columns[None, :],
            mask=head_mask(inside[:, None], columns, D),
            other=0.0,
        )
        score = tl.sum(tl.dot(tile, query), axis=1)
        tl.store(keys + index, order_keys(score), mask=inside)


@triton.jit
def _score_query(
    q_group: tl.tensor,
    channel: tl.tensor,
    exists: tl.tensor,
    BEST_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """fp32 queries [pairs, COLUMNS] at the given channels, each in four columns; 0 in padding.

    Under BEST_HEAD these are the heads of the group, some of them twice; else their mean.
    """
    if BEST_HEAD:
        head = (tl.arange(0, COLUMNS) // 4) % GROUP
        at = q_group + head[None, :] * D + channel[:, None]
        return tl.load(at, mask=exists[:, None], other=0.0).to(tl.float32)
    else:
        member = tl.arange(0, GROUP_PAD)
        mask = (member[:, None] < GROUP) & exists[None, :]
        heads = tl.load(q_group + member[:, None] * D + channel[None, :], mask=mask, other=0.0)
        mean = tl.sum(heads.to(tl.float32), axis=0) / GROUP
        return tl.broadcast_to(mean[:, None], (mean.shape[0], COLUMNS))


@triton.jit
def _digits(query: tl.tensor, to_fixed: tl.tensor, place: tl.tensor) -> tl.tensor:
    """The signed base-256 digit at each column's `place` of query * to_fixed, in int32."""
    fixed = (query * to_fixed[None, :]).to(tl.int32)
    # With 128 added to the three lower digits, the bytes of a sum of digits are these digits.
    byte = ((fixed + 0x808080) >> (8 * place[None, :])) & 255
    return tl.where(place[None, :] < 3, byte, byte ^ 128) - 128


@triton.jit
def _unpack(codes: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The lower and the upper four bits of each byte, as int8."""
    if INTERPRETED:
        return (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)
    else:
        # Four bytes at once; the compiler would take them apart and put them together again.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 upper; and.b32 $0, $2, 0x0F0F0F0F; shr.u32 upper, $2, 4;"
            " and.b32 $1, upper, 0x0F0F0F0F; }",
            "=r,=r,r",
            [codes],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def score_int4_pages(
    q_group: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    head: tl.tensor,
    pages: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BEST_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LANDMARKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write the keys of pages [first, end), each of which has LANDMARKS int4 landmarks.

    Codes stay whole numbers: turning 4 bits into a float costs more than loading them. A query
    becomes a 31-bit fixed-point number, at the exponent of its largest channel, in four int8
    digits. The sums of codes by digits are exact; fp32 takes part when they are put together. A
    query that is not finite makes a product that is not a number, and counts for no page.
    """
    # Columns 4h to 4h + 3 hold the digits of query h; tensor cores take 8 columns or more.
    COLUMNS: tl.constexpr = 4 * GROUP_PAD if BEST_HEAD and GROUP_PAD > 1 else 8
    pair = pair_columns(PAIRS)
    exists = pair < PAIRS
    channel = tl.load(pairs + head * PAIRS + pair, mask=exists, other=0)
    first_query = _score_query(q_group, channel, exists, BEST_HEAD, GROUP, GROUP_PAD, D, COLUMNS)
    second_query = _score_query(
        q_group, channel + D // 2, exists, BEST_HEAD, GROUP, GROUP_PAD, D, COLUMNS
    )
    largest = tl.maximum(tl.max(tl.abs(first_query), 0), tl.max(tl.abs(second_query), 0))
    nan = (first_query != first_query) | (second_query != second_query)
    finite = (tl.max(nan.to(tl.int32), axis=0) == 0) & (largest < float("inf"))
    # 2**exponent in fp32 is (127 + exponent) << 23; below 30 the digits would not be normal.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 30)
    to_fixed = ((283 - exponent) << 23).to(tl.float32, bitcast=True)
    place = tl.arange(0, COLUMNS) % 4
    first_digits = _digits(first_query, to_fixed, place)
    second_digits = _digits(second_query, to_fixed, place)
    unit = ((exponent - 29 + 8 * place) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(finite, unit, float("nan"))
    # Four bits hold 8 + code.
    offset = -8 * (tl.sum(first_digits, axis=0) + tl.sum(second_digits, axis=0))
    first_digits = first_digits.to(tl.int8)
    second_digits = second_digits.to(tl.int8)
    tile_row = tl.arange(0, BLOCK * LANDMARKS)
    start_value = tl.zeros((BLOCK * LANDMARKS, COLUMNS), tl.int32) + offset[None, :]
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        # Rows past the end repeat the last page, which costs less than masking them.
        index = tl.minimum(start + tile_row // LANDMARKS, end - 1)
        page = tl.load(pages + index).to(tl.int64)
        landmark = (page * HEADS + head) * LANDMARKS + tile_row % LANDMARKS
        # What padding columns hold meets digits of 0.
        tile = tl.load(codes + landmark[:, None] * PAIRS + pair[None, :], mask=exists[None, :])
        scale = tl.load(scales + landmark).to(tl.float32)
        first_codes, second_codes = _unpack(tile)
        sums = tl.dot(first_codes, first_digits, start_value, out_dtype=tl.int32)
        sums = tl.dot(second_codes, second_digits, sums, out_dtype=tl.int32)
        parts = sums.to(tl.float32) * unit[None, :]
        product = tl.sum(tl.reshape(parts, (BLOCK * LANDMARKS, COLUMNS // 4, 4)), axis=2)
        # A product that is not a number does not count, unless there is no other.
        score = tl.max(product * scale[:, None], axis=1)
        score = tl.max(tl.reshape(score, (BLOCK, LANDMARKS)), axis=1)
        block_index = start + tl.arange(0, BLOCK)
        tl.store(keys + block_index, order_keys(score), mask=block_index < end)
