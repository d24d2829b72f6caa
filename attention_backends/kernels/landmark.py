"""Landmarks of full pages: in, SGLang's token pool; out, landmarks [num_pages, Hkv, D]."""

import torch
import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernels.checks import (
    HEAD_DIMS,
    INDEX_DTYPES,
    KV_DTYPES,
    PAGE_SIZES,
    check_contiguous,
    check_member,
    check_tensor,
)

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
    page_index = tl.program_id(0)
    row = tl.program_id(1)
    full_pages = tl.load(seq_lens + row) // PAGE
    first_page = tl.load(prefix_lens + row) // PAGE
    if (page_index >= first_page) & (page_index < full_pages):
        page = tl.load(page_table + row.to(tl.int64) * table_stride + page_index).to(tl.int64)
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        mask = columns < ROW
        mean = page_mean(k_buffer, page * PAGE, columns, mask, ROW, PAGE)
        target = landmarks + page * ROW + columns
        tl.store(target, mean.to(landmarks.dtype.element_ty), mask=mask)


def update_landmarks_bulk(
    k_buffer: torch.Tensor,
    landmarks: torch.Tensor,
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
        landmarks: [num_pages, Hkv, D] in the dtype of the keys, contiguous; written.
        page_table: [bs, >= max_pages] int32, physical pages.
        seq_lens: [bs] int32 or int64, cached tokens.
        prefix_lens: [bs], same dtypes: tokens whose full pages have landmarks already; 0 for all.
        page_size: 16, 32 or 64.
        max_pages: pages of the longest request, a host number that sizes the grid.
    """
    _, num_kv_heads, head_dim = k_buffer.shape
    batch = seq_lens.shape[0]
    check_member("page_size", page_size, PAGE_SIZES)
    check_member("head_dim", head_dim, HEAD_DIMS)
    check_tensor("k_buffer", k_buffer, (None, None, None), KV_DTYPES)
    check_tensor("landmarks", landmarks, (None, num_kv_heads, head_dim), (k_buffer.dtype,))
    check_tensor("page_table", page_table, (batch, None), (torch.int32,))
    check_tensor("seq_lens", seq_lens, (batch,), INDEX_DTYPES)
    check_tensor("prefix_lens", prefix_lens, (batch,), INDEX_DTYPES)
    check_contiguous("k_buffer", k_buffer)
    check_contiguous("landmarks", landmarks)
    row = num_kv_heads * head_dim
    columns = min(_COLUMNS, triton.next_power_of_2(row))
    _landmarks_kernel[(max_pages, batch, triton.cdiv(row, columns))](
        k_buffer,
        landmarks,
        page_table,
        seq_lens,
        prefix_lens,
        page_table.stride(0),
        ROW=row,
        PAGE=page_size,
        COLUMNS=columns,
        num_warps=max(1, columns // 256),
    )
