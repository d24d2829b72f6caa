"""Landmarks of full pages, in either form, from SGLang's token pool."""

import torch
import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernels.common import (
    assert_dense,
    head_columns,
    pair_columns,
    store_head,
)
from sparrow_sglang.attention_backends.landmarks import Int4Landmarks, Landmarks

# One thread reads 16 bytes of a row: 1024 columns of 2 bytes are 4 warps side by side, each thread
# sums its own 8 columns, and a page needs no exchange between threads.
_COLUMNS = 1024


@triton.jit
def page_mean(
    k_buffer: tl.tensor,
    first_slot: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """fp32 mean over the PAGE slots from `first_slot`, at the given columns of a slot's ROW."""
    base = k_buffer + first_slot.to(tl.int64) * ROW + columns
    total = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, PAGE):
        total += tl.load(base + slot * ROW, mask=mask, other=0.0).to(tl.float32)
    return total / PAGE


@triton.jit
def store_int4_landmarks(
    k_buffer: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    page: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    ROW: tl.constexpr = HEADS * D
    TOKENS: tl.constexpr = PAGE // LANDMARKS
    pair = pair_columns(PAIRS)
    exists = pair[None, :] < PAIRS
    landmark = tl.arange(0, LANDMARKS)
    first_slot = page * PAGE + landmark[:, None] * TOKENS
    channel = tl.load(pairs + head * PAIRS + pair, mask=pair < PAIRS, other=0)
    at = k_buffer + first_slot * ROW + head * D + channel[None, :]
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=exists, other=0.0).to(tl.float32)
    for token in tl.static_range(1, TOKENS):
        first += tl.load(at + token * ROW, mask=exists, other=0.0).to(tl.float32)
        second += tl.load(at + token * ROW + D // 2, mask=exists, other=0.0).to(tl.float32)
    first *= 1.0 / TOKENS
    second *= 1.0 / TOKENS
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    nan = ((first != first) | (second != second)).to(tl.int32)
    largest = tl.where(tl.max(nan, axis=1) > 0, float("nan"), largest)
    scale = tl.div_rn(largest, tl.full(largest.shape, 7.0, tl.float32)).to(tl.float16)
    divisor = scale.to(tl.float32)[:, None]
    packed = _nibble(first, divisor) | (_nibble(second, divisor) << 4)
    row = (page * HEADS + head) * LANDMARKS + landmark
    tl.store(codes + row[:, None] * PAIRS + pair[None, :], packed.to(tl.uint8), mask=exists)
    tl.store(scales + row, scale)


@triton.jit
def _nibble(mean: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """8 + code in int32; a code is 0 where the scale is 0 or mean / scale is not a number."""
    ratio = tl.div_rn(mean, tl.broadcast_to(divisor, mean.shape))
    ratio = tl.where((ratio == ratio) & (divisor != 0.0), ratio, 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -7.0), 7.0)
    # 1.5 * 2**23 leaves no bits for a fraction: the sum is rounded half to even.
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int32) + 8


@triton.jit
def update_landmark_of_last_page(
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    pages: tl.tensor,
    seq_len: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Write the landmarks of the page that the current token filled, if it filled one.

    That page is the most recent one, which this step keeps without scoring it.
    """
    if (seq_len > 0) & (seq_len % PAGE == 0):
        page = tl.load(pages + seq_len // PAGE - 1).to(tl.int64)
        if PAIRS > 0:
            store_int4_landmarks(
                k_buffer, landmarks, scales, pairs, page, head, HEADS, D, PAGE, LANDMARKS, PAIRS
            )
        else:
            columns = head_columns(D)
            at = head * D + columns
            mean = page_mean(k_buffer, page * PAGE, at, columns < D, HEADS * D, PAGE)
            store_head(landmarks + (page * HEADS + head) * D, columns, mean, D)


@triton.jit
def _full_page(
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    table_stride: tl.tensor,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Physical page of program (page, row, ...), int64; -1 if it is not full.

    Program 0 has the first page that the prefix does not fill.
    """
    row = tl.program_id(1)
    page_index = tl.load(prefix_lens + row) // PAGE + tl.program_id(0)
    is_full = page_index < tl.load(seq_lens + row) // PAGE
    at = page_table + row.to(tl.int64) * table_stride + page_index
    return tl.load(at, mask=is_full, other=-1).to(tl.int64)


@triton.jit
def _landmarks_kernel(
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    table_stride: tl.tensor,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (page, row, column block) writes COLUMNS columns of one page's landmark."""
    page = _full_page(page_table, seq_lens, prefix_lens, table_stride, PAGE)
    if page >= 0:
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        mask = columns < ROW
        mean = page_mean(k_buffer, page * PAGE, columns, mask, ROW, PAGE)
        target = landmarks + page * ROW + columns
        tl.store(target, mean.to(landmarks.dtype.element_ty), mask=mask)


@triton.jit
def _int4_landmarks_kernel(
    k_buffer: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Program (page, row, head) writes the landmarks of one page and KV head."""
    page = _full_page(page_table, seq_lens, prefix_lens, table_stride, PAGE)
    if page >= 0:
        head = tl.program_id(2)
        store_int4_landmarks(
            k_buffer, codes, scales, pairs, page, head, HEADS, D, PAGE, LANDMARKS, PAIRS
        )


def update_landmarks_bulk(
    k_buffer: torch.Tensor,
    landmarks: Landmarks,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    page_size: int,
    max_pages: int,
) -> None:
    """Write the landmark of every full page from prefix_lens // page_size on; used after an extend.

    Args:
        k_buffer: [num_slots, Hkv, D], contiguous.
        landmarks: one per page in the dtype of the keys, or int4 ones; written.
        page_table: [bs, >= max_pages] int32, physical pages.
        seq_lens: [bs] int32 or int64, cached tokens.
        prefix_lens: [bs], same dtypes: tokens whose full pages have landmarks already; 0 for all.
        max_pages: most pages that a request has beyond its full ones of the prefix, a host number
            that sizes the grid.
    """
    _, num_kv_heads, head_dim = k_buffer.shape
    batch = seq_lens.shape[0]
    assert_dense(k_buffer, *landmarks)
    assert len(page_table) == len(prefix_lens) == batch
    if isinstance(landmarks, Int4Landmarks):
        _int4_landmarks_kernel[(max_pages, batch, num_kv_heads)](
            k_buffer,
            landmarks.codes,
            landmarks.scales,
            landmarks.pairs,
            page_table,
            seq_lens,
            prefix_lens,
            page_table.stride(0),
            HEADS=num_kv_heads,
            D=head_dim,
            PAGE=page_size,
            LANDMARKS=landmarks.codes.shape[2],
            PAIRS=landmarks.codes.shape[3],
            num_warps=1,
        )
        return
    row = num_kv_heads * head_dim
    columns = min(_COLUMNS, triton.next_power_of_2(row))
    _landmarks_kernel[(max_pages, batch, triton.cdiv(row, columns))](
        k_buffer,
        landmarks.means,
        page_table,
        seq_lens,
        prefix_lens,
        page_table.stride(0),
        ROW=row,
        PAGE=page_size,
        COLUMNS=columns,
        num_warps=max(1, columns // 256),
    )


@triton.jit(do_not_specialize=["table_stride"])
def _last_landmarks_kernel(
    addresses: tl.tensor,
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Program (row, layer, head); the tensors of one layer give the types."""
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens + row)
    if (seq_len > 0) & (seq_len % PAGE == 0):
        of_layer = addresses + tl.program_id(1) * 4
        update_landmark_of_last_page(
            tl.load(of_layer).to(k_buffer.dtype),
            tl.load(of_layer + 1).to(landmarks.dtype),
            tl.load(of_layer + 2).to(scales.dtype),
            tl.load(of_layer + 3).to(pairs.dtype),
            page_table + row.to(tl.int64) * table_stride,
            seq_len,
            tl.program_id(2),
            HEADS,
            D,
            PAGE,
            LANDMARKS,
            PAIRS,
        )


def _tensors(landmarks: Landmarks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if isinstance(landmarks, Int4Landmarks):
        return landmarks.codes, landmarks.scales, landmarks.pairs
    return (landmarks.means,) * 3


def address_table(
    k_buffers: dict[int, torch.Tensor], landmarks: dict[int, Landmarks]
) -> torch.Tensor:
    """For `update_last_landmarks`: [layers, 4] int64, of keys and landmarks by layer."""
    rows = [
        [tensor.data_ptr() for tensor in (k_buffer, *_tensors(landmarks[layer]))]
        for layer, k_buffer in k_buffers.items()
    ]
    device = next(iter(k_buffers.values())).device
    return torch.tensor(rows, dtype=torch.int64, device=device)


def update_last_landmarks(
    addresses: torch.Tensor,
    k_buffer: torch.Tensor,
    landmarks: Landmarks,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Write the landmarks of the pages that a decode step filled, in all layers in one launch.

    Args:
        addresses: `address_table` of all layers.
        k_buffer: [num_slots, Hkv, D] of any of them, as are `landmarks`.
        page_table: [bs, max_pages] int32, physical pages.
        seq_lens: [bs] int32 or int64, cached tokens, the new one included.
    """
    _, num_kv_heads, head_dim = k_buffer.shape
    tensors = _tensors(landmarks)
    int4 = isinstance(landmarks, Int4Landmarks)
    _last_landmarks_kernel[(len(seq_lens), len(addresses), num_kv_heads)](
        addresses,
        k_buffer,
        *tensors,
        page_table,
        seq_lens,
        page_table.stride(0),
        HEADS=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        LANDMARKS=tensors[0].shape[2] if int4 else 1,
        PAIRS=tensors[0].shape[3] if int4 else 0,
        num_warps=1,
    )
