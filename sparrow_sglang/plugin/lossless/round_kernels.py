"""Kernels of the begin and the end of a round, which `drafts.py` defines."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        *("table_stride", "longest", "truncated", "request_stride", "row_stride", "count")
    ],
    do_not_specialize_on_alignment=["rows", "committed", "latest", "top_ks", "temperatures"],
)
def begin_kernel(
    table: tl.tensor,
    table_stride: tl.tensor,
    longest: tl.tensor,
    rows: tl.tensor,
    committed: tl.tensor,
    latest: tl.tensor,
    top_ks: tl.tensor,
    temperatures: tl.tensor,
    truncated: tl.tensor,
    divisors: tl.tensor,
    arrived: tl.tensor,
    new: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Program (request) writes tokens, positions and slots of a round, and what by its logits are
    divided: its temperature, 1 for truncated probabilities, -1 if it is greedy."""
    request = tl.program_id(0)
    number = tl.arange(0, WIDTH)
    mask = number < count
    position = tl.load(committed + request).to(tl.int64) + number
    row = tl.load(rows + request).to(tl.int64)
    slot = tl.load(table + row * table_stride + position, mask=mask, other=0)
    out = new + request * request_stride + number * row_stride
    kind = tl.num_programs(0) * count
    tl.store(out, tl.load(latest + request).to(tl.int64), mask=mask)
    tl.store(out + kind, tl.minimum(position, longest - 1), mask=mask)
    tl.store(out + 2 * kind, slot.to(tl.int64), mask=mask)
    divisor = tl.where(truncated != 0, 1.0, tl.load(temperatures + request))
    tl.store(divisors + request, tl.where(tl.load(top_ks + request) > 1, divisor, -1.0))
    tl.store(arrived + request, 0)


@triton.jit(
    do_not_specialize=[
        *("tokens_request", "tokens_row", "count", "before_rows", "table_stride", "longest")
    ],
    do_not_specialize_on_alignment=["accepted", "bonus", "committed", "histories"],
)
def end_kernel(
    tokens: tl.tensor,
    tokens_request: tl.tensor,
    tokens_row: tl.tensor,
    count: tl.tensor,
    accepted: tl.tensor,
    bonus: tl.tensor,
    committed: tl.tensor,
    before: tl.tensor,
    before_counts: tl.tensor,
    before_rows: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    histories: tl.tensor,
    table_stride: tl.tensor,
    texts: tl.tensor,
    longest: tl.tensor,
    known: tl.tensor,
    RECORD: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (request) writes what a round has written, behind what the one before it has, and
    appends it to a history."""
    request = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    earlier = tl.load(before_counts + request, mask=before_rows > 0, other=0)
    number = column - earlier
    is_new = (number >= 0) & (number < count)
    of_request = tokens + request * tokens_request
    token = tl.load(of_request + (number + 1) % count * tokens_row, mask=is_new, other=0)
    last = tl.load(accepted + request)
    token = tl.where(number == last, tl.load(bonus + request), token)
    rows = before_rows + count
    token += tl.load(before + request * before_rows + column, mask=column < earlier, other=0)
    tl.store(out + request * rows + column, token, mask=column < rows)
    tl.store(counts + request, (earlier + last + 1).to(tl.int32))
    length = tl.load(committed + request).to(tl.int64) + last + 1
    tl.store(lengths + request, length)
    if RECORD:
        history = tl.load(histories + request * table_stride).to(tl.int64)
        at = texts + history * longest + length - last + number
        tl.store(at, token.to(tl.int32), mask=is_new)
        tl.store(known + history, (length + 1).to(tl.int32))
