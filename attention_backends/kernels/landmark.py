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
    page: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
) -> None:
    ROW: tl.constexpr = HEADS * D
    TOKENS: tl.constexpr = PAGE // LANDMARKS
    PAIRS: tl.constexpr = D // 2
    pair = pair_columns(D)
    exists = pair[None, :] < PAIRS
    landmark = tl.arange(0, LANDMARKS)
    first_slot = page * PAGE + landmark[:, None] * TOKENS
    at = k_buffer + first_slot * ROW + head * D + pair[None, :]
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + PAIRS, mask=exists, other=0.0).to(tl.float32)
    for token in tl.static_range(1, TOKENS):
        first += tl.load(at + token * ROW, mask=exists, other=0.0).to(tl.float32)
        second += tl.load(at + token * ROW + PAIRS, mask=exists, other=0.0).to(tl.float32)
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
def _store_landmarks(
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    scales: tl.tensor,
    page: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
) -> None:
    """Those of one page and KV head: LANDMARKS int4 ones, or a mean where that is 0."""
    if LANDMARKS > 0:
        store_int4_landmarks(k_buffer, landmarks, scales, page, head, HEADS, D, PAGE, LANDMARKS)
    else:
        columns = head_columns(D)
        at = head * D + columns
        mean = page_mean(k_buffer, page * PAGE, at, columns < D, HEADS * D, PAGE)
        store_head(landmarks + (page * HEADS + head) * D, columns, mean, D)


@triton.jit
def update_landmark_of_last_page(
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    scales: tl.tensor,
    pages: tl.tensor,
    seq_len: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
) -> None:
    """Write the landmarks of the page that the current token filled, if it filled one. That page is
    the most recent one, which this step keeps without scoring it."""
    if (seq_len > 0) & (seq_len % PAGE == 0):
        page = tl.load(pages + seq_len // PAGE - 1).to(tl.int64)
        _store_landmarks(k_buffer, landmarks, scales, page, head, HEADS, D, PAGE, LANDMARKS)


@triton.jit(do_not_specialize=["table_stride", "before", "after"])
def _landmarks_kernel(
    addresses: tl.tensor,
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    scales: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    table_stride: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    LANDMARKS: tl.constexpr,
) -> None:
    """Program (page, row, layer and head); the tensors of one layer give the types."""
    row = tl.program_id(1)
    layer, head = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    seq_len = tl.load(seq_lens + row)
    index = tl.maximum(seq_len - before, 0) // PAGE + tl.program_id(0)
    if index < (seq_len + after) // PAGE:
        of_layer = addresses + layer * 3
        _store_landmarks(
            tl.multiple_of(tl.load(of_layer).to(k_buffer.dtype), 16),
            tl.multiple_of(tl.load(of_layer + 1).to(landmarks.dtype), 16),
            tl.load(of_layer + 2).to(scales.dtype),
            tl.load(page_table + row.to(tl.int64) * table_stride + index).to(tl.int64),
            head,
            HEADS,
            D,
            PAGE,
            LANDMARKS,
        )


def kernel_tensors(landmarks: Landmarks) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Codes, scales and their number of a page; means twice and 0 under the published rule."""
    if isinstance(landmarks, Int4Landmarks):
        return landmarks.codes, landmarks.scales, landmarks.codes.shape[2]
    return landmarks.means, landmarks.means, 0


def address_table(
    k_buffers: dict[int, torch.Tensor], landmarks: dict[int, Landmarks]
) -> torch.Tensor:
    """For `update_landmarks`: [layers, 3] int64, of keys and landmarks by layer, contiguous."""
    rows = []
    for layer, k_buffer in k_buffers.items():
        tensors = k_buffer, *kernel_tensors(landmarks[layer])[:2]
        assert_dense(*tensors)
        rows.append([tensor.data_ptr() for tensor in tensors])
    # As the kernel is told.
    assert all(address % 16 == 0 for row in rows for address in row[:2])
    device = next(iter(k_buffers.values())).device
    return torch.tensor(rows, dtype=torch.int64, device=device)


def update_landmarks(
    addresses: torch.Tensor,
    k_buffer: torch.Tensor,
    landmarks: Landmarks,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    before: int,
    after: int = 0,
) -> None:
    """Write the landmarks of pages that a dense pass filled, in all layers in one launch: the full
    pages of seq_len + after tokens from the one on that holds token seq_len - before, which are all
    where `before` is no less than the longest seq_len. `addresses` is the `address_table` of all
    layers; `k_buffer` [num_slots, Hkv, D] and `landmarks` are those of any of them. `page_table`
    [bs, max_pages] int32 holds physical pages; `seq_lens` [bs] are int32 or int64."""
    _, num_kv_heads, head_dim = k_buffer.shape
    values, scales, count = kernel_tensors(landmarks)
    most_pages = (before + after + page_size - 2) // page_size + 1
    _landmarks_kernel[(most_pages, len(seq_lens), len(addresses) * num_kv_heads)](
        addresses,
        k_buffer,
        values,
        scales,
        page_table,
        seq_lens,
        page_table.stride(0),
        before,
        after,
        HEADS=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        LANDMARKS=count,
        num_warps=1,
    )
