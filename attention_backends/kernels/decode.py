"""Attention of one query token per request over its selected pages: split-KV, no host-side plan.

In: queries, the KV pool, page ids from `select` and how many of them count. Out: [bs, Hq, D]. The
split of the work depends on numbers that the kernel reads itself, so a captured launch serves every
length.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sparrow_sglang.attention_backends.kernel_limits import HEAD_DIMS, MAX_GROUP, PAGE_SIZES
from sparrow_sglang.attention_backends.kernels.attend import attend, half_queries
from sparrow_sglang.attention_backends.kernels.common import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_contiguous,
    check_member,
    check_tensor,
    group_size,
    head_columns,
    head_mask,
    sm_count,
    store_head,
)

_LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
# Numbers of splits that a kernel merges at most. One kernel is compiled for each of these, and a
# launch takes the smallest that is large enough.
_SPLIT_PADS = (4, 16, 32, MAX_SPLITS)
# Below this a program's start-up (page ids, then the first tiles) costs more than its tokens.
_MIN_SPLIT_TOKENS = 128
_PROGRAMS_PER_SM = 4
# This many programs of FP8 tiles fit in the shared memory of an SM, unless head_dim is 256.
_FP8_PROGRAMS_PER_SM = 7


class DecodeScratch(NamedTuple):
    """partial_out: [programs · group, D] fp32 and partial_lse: [programs · group] fp32, any
    content; arrivals: [rows] int32, zero between launches."""

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor


class DecodeLaunch(NamedTuple):
    """Launch shape, fixed at capture.

    splits: programs that share one (request, KV head); block_tokens: tokens a tile; stages: tiles
    in flight.
    """

    splits: int
    block_tokens: int = 32
    num_warps: int = 1
    stages: int = 5


def decode_launch(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_selected_tokens: int,
    device: torch.device,
    kv_itemsize: int,
) -> DecodeLaunch:
    """One wave of one-warp programs of at least _MIN_SPLIT_TOKENS tokens each.

    Small tiles and many independent programs keep more loads in flight than wide tiles do.

    Args:
        kv_itemsize: bytes of a number in the KV pool, 2 or 1.
    """
    fp8 = kv_itemsize == 1 and head_dim <= 128
    programs_per_sm = _FP8_PROGRAMS_PER_SM if fp8 else _PROGRAMS_PER_SM
    wanted = programs_per_sm * sm_count(device) // (batch * num_kv_heads)
    useful = triton.cdiv(max_selected_tokens, _MIN_SPLIT_TOKENS)
    return DecodeLaunch(
        splits=max(1, min(wanted, useful, MAX_SPLITS)),
        block_tokens=max(16, 4096 // triton.next_power_of_2(head_dim)),
    )


def allocate_decode_scratch(
    parts: int, rows: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch that all layers and batch sizes may share.

    Args:
        parts: largest bs·Hq·splits of the launches that will use it.
        rows: largest bs·Hkv.
    """
    return DecodeScratch(
        partial_out=torch.empty(parts, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(parts, dtype=torch.float32, device=device),
        arrivals=torch.zeros(rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _split_tokens(kept: tl.tensor, splits: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Tokens a split: an even share of this row, in whole tiles. Rows differ in length, so each
    row is cut by its own count; a fixed share would leave SMs idle on short rows."""
    return tl.cdiv(tl.cdiv(kept, splits), BLOCK) * BLOCK


@triton.jit
def _kept_tokens(
    num_selected: tl.tensor,
    seq_lens: tl.tensor,
    row: tl.tensor,
    PAGE: tl.constexpr,
    EVERY_PAGE: tl.constexpr,
) -> tl.tensor:
    """Tokens in the selected pages of a row; all are full but the last one."""
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    if EVERY_PAGE:
        return seq_len
    else:
        count = tl.load(num_selected + row).to(tl.int32)
        return tl.where(count > 0, (count - 1) * PAGE + (seq_len - 1) % PAGE + 1, 0)


@triton.jit
def _merge_splits(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    out_row: tl.tensor,
    pair: tl.tensor,
    active: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    """Combine the splits of one (request, KV head), one query head after the other."""
    columns = head_columns(D)
    split = tl.arange(0, SPLITS_PAD)
    # The registers of one warp hold the outputs of this many splits, and not many more.
    CHUNK: tl.constexpr = min(SPLITS_PAD, 2048 // columns.shape[0])
    for member in tl.static_range(GROUP):
        first = (pair.to(tl.int64) * GROUP + member) * splits
        # .cg reads from L2, because other SMs wrote these numbers.
        lse = tl.load(
            partial_lse + first + split,
            mask=split < active,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        top = tl.max(lse, axis=0)
        merged = tl.zeros(columns.shape, tl.float32)
        for start in tl.static_range(0, SPLITS_PAD, CHUNK):
            part = start + tl.arange(0, CHUNK)
            share = tl.load(
                partial_lse + first + part,
                mask=part < active,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            parts = tl.load(
                partial_out + (first + part[:, None]) * D + columns[None, :],
                mask=head_mask(part[:, None] < active, columns, D),
                other=0.0,
                cache_modifier=".cg",
            )
            merged += tl.sum(parts * tl.exp2(share - top)[:, None], axis=0)
        merged /= tl.sum(tl.exp2(lse - top), axis=0)
        store_head(out_row + member * D, columns, merged, D)


# `splits` differs by batch size. If it were a constant, a kernel would be compiled for each value.
@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    q: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    sinks: tl.tensor,
    page_ids: tl.tensor,
    num_selected: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    arrivals: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    q_stride: tl.tensor,
    ids_row_stride: tl.tensor,
    ids_head_stride: tl.tensor,
    out_stride: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    MMA_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVERY_PAGE: tl.constexpr,
    HAS_ATTN_SINKS: tl.constexpr,
    AFTER_SELECT: tl.constexpr,
) -> None:
    """Program (row · HEADS + head, split) attends to its share of the row's kept tokens."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    row = (pair // HEADS).to(tl.int64)
    head = pair % HEADS
    kept = _kept_tokens(num_selected, seq_lens, row, PAGE, EVERY_PAGE)
    share = _split_tokens(kept, splits, BLOCK)
    first = split * share
    # A row without tokens still has one program, which writes zeros.
    if (first < kept) | (split == 0):
        columns = head_columns(D)
        member = tl.arange(0, MMA_ROWS)
        used = head_mask(member[:, None] < GROUP, columns, D)
        offsets = (head * GROUP + member[:, None]) * D + columns[None, :]
        queries = tl.load(q + row * q_stride + offsets, mask=used, other=0.0)
        if k_buffer.dtype.element_ty == tl.float8e4nv:
            operand, factor = half_queries(queries, scale)
        else:
            operand, factor = queries, scale
        sink = tl.full((MMA_ROWS,), float("-inf"), tl.float32)
        if HAS_ATTN_SINKS:
            # Only split 0 includes the sinks; the merge combines it with the other splits.
            mine = (member < GROUP) & (split == 0)
            loaded = tl.load(sinks + head * GROUP + member, mask=mine, other=float("-inf"))
            sink = loaded.to(tl.float32) * 1.4426950408889634  # log2(e)
        if AFTER_SELECT:
            # Everything read up to here was written before the selection kernel started.
            gdc_wait()
        pages = page_ids + row * ids_row_stride + head * ids_head_stride
        end = tl.minimum(first + share, kept)
        k_head = k_buffer + head * D
        v_head = v_buffer + head * D
        result, lse = attend(
            operand,
            k_head,
            v_head,
            pages,
            first,
            end,
            factor,
            sink,
            HEADS * D,
            D,
            PAGE,
            BLOCK,
            STAGES,
        )
        result *= v_scale
        out_row = out + row * out_stride + head * GROUP * D
        if share >= kept:
            own = member[:, None] * D + columns[None, :]
            tl.store(out_row + own, result.to(out.dtype.element_ty), mask=used)
        else:
            part = (pair.to(tl.int64) * GROUP + member) * splits + split
            tl.store(partial_lse + part, lse, mask=member < GROUP)
            tl.store(partial_out + part[:, None] * D + columns[None, :], result, mask=used)
            # Every thread must have stored its part before this program reports its arrival.
            tl.debug_barrier()
            active = tl.cdiv(kept, share)
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                # Reset the counter for the next launch, or the next replay of a graph.
                tl.store(arrivals + pair, 0)
                _merge_splits(
                    partial_out, partial_lse, out_row, pair, active, splits, GROUP, D, SPLITS_PAD
                )


def _check_scratch(scratch: DecodeScratch, rows: int, group: int, splits: int) -> None:
    """Raise `ValueError` if `scratch` has no room for this launch."""
    parts = rows * group * splits
    if splits > 1 and scratch.partial_lse.shape[0] < parts:
        raise ValueError(
            f"scratch holds {scratch.partial_lse.shape[0]} partial rows: expected at least "
            f"bs·Hq·splits={parts}; allocate it with more parts"
        )
    if splits > 1 and scratch.arrivals.shape[0] < rows:
        raise ValueError(
            f"scratch holds {scratch.arrivals.shape[0]} rows: expected at least bs·Hkv={rows}; "
            "allocate it with more rows"
        )


def _check_pools(
    q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, out: torch.Tensor
) -> None:
    batch, num_q_heads, head_dim = q.shape
    check_member("head_dim", head_dim, HEAD_DIMS)
    pool = (k_buffer.shape[0], k_buffer.shape[1], head_dim)
    check_tensor("q", q, (batch, num_q_heads, head_dim), FLOAT_DTYPES)
    check_tensor("k_buffer", k_buffer, pool, (q.dtype, torch.float8_e4m3fn))
    check_tensor("v_buffer", v_buffer, pool, (k_buffer.dtype,))
    check_tensor("out", out, (batch, num_q_heads, head_dim), (q.dtype,))
    check_contiguous("k_buffer", k_buffer)
    check_contiguous("v_buffer", v_buffer)
    for name, tensor in (("q", q), ("out", out)):
        if tensor.stride(1) != head_dim:
            raise ValueError(
                f"{name} has strides {tensor.stride()}: expected heads side by side in each row"
            )


def sparse_decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_ids: torch.Tensor,
    num_selected: torch.Tensor | None,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    sm_scale: float,
    v_scale: float = 1.0,
    scratch: DecodeScratch,
    launch: DecodeLaunch,
    sinks: torch.Tensor | None = None,
    after_select: bool = False,
) -> None:
    """Attend exactly to the selected pages, as `reference.sparse_decode` defines it.

    With the page table for every head (`page_table[:, None].expand(bs, Hkv, max_pages)`) and
    without num_selected, the same launch is dense decode.

    Args:
        q: [bs, Hq, D]; 1 to 16 query heads for each KV head.
        k_buffer, v_buffer: [num_slots, Hkv, D], contiguous, in q's dtype or both in FP8 (e4m3).
        page_ids: [bs, Hkv, K] int32, physical pages in ascending logical order; the head axis may
            be expanded.
        num_selected: [bs] int32, how many entries of page_ids are valid; None for all pages of a
            row.
        seq_lens: [bs] int32 or int64, the current token included.
        out: [bs, Hq, D] in q's dtype; written. A row of length 0 reads as 0.
        sm_scale: factor of the logits, the scale of FP8 keys included.
        v_scale: scale of FP8 values, a factor of the output.
        sinks: [Hq], one more logit of each query head, with a value of 0; None for none.
        after_select: the launch before this one is `select_pages` with `dependents`, which wrote
            page_ids; this one may start before it ends.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group = group_size(num_q_heads, num_kv_heads)
    check_member("page_size", page_size, PAGE_SIZES)
    check_tensor("page_ids", page_ids, (batch, num_kv_heads, None), (torch.int32,))
    if num_selected is not None:
        check_tensor("num_selected", num_selected, (batch,), (torch.int32,))
    check_tensor("seq_lens", seq_lens, (batch,), INDEX_DTYPES)
    _check_pools(q, k_buffer, v_buffer, out)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_q_heads,), (torch.float32, *FLOAT_DTYPES))
    _check_scratch(scratch, batch * num_kv_heads, group, launch.splits)
    _decode_kernel[(batch * num_kv_heads, launch.splits)](
        q,
        k_buffer,
        v_buffer,
        q if sinks is None else sinks,
        page_ids,
        seq_lens if num_selected is None else num_selected,
        seq_lens,
        out,
        scratch.partial_out,
        scratch.partial_lse,
        scratch.arrivals,
        sm_scale * _LOG2_E,
        v_scale,
        q.stride(0),
        page_ids.stride(0),
        page_ids.stride(1),
        out.stride(0),
        launch.splits,
        HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page_size,
        SPLITS_PAD=next(pad for pad in _SPLIT_PADS if launch.splits <= pad),
        MMA_ROWS=MAX_GROUP,
        BLOCK=launch.block_tokens,
        STAGES=launch.stages,
        EVERY_PAGE=num_selected is None,
        HAS_ATTN_SINKS=sinks is not None,
        AFTER_SELECT=after_select,
        num_warps=launch.num_warps,
        # Triton's interpreter does not take this argument.
        **({"launch_pdl": True} if after_select else {}),
    )
