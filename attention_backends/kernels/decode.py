"""Attention of one query token per request over its selected pages: split-KV, no host-side plan.
The split of the work depends on numbers that the kernel reads itself, so a captured launch serves
every length. A second kernel merges the splits, each query head in programs of its own."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparrow_sglang.attention_backends.kernel_limits import MAX_GROUP
from sparrow_sglang.attention_backends.kernels.common import (
    INTERPRETED,
    assert_dense,
    dependent_launch,
    head_columns,
    head_mask,
    launch_early,
    sm_count,
)

_LOG2_E = 1.4426950408889634
MAX_SPLITS = 128
# Numbers of splits that a kernel merges at most. One kernel is compiled for each of these, and a
# launch takes the smallest that is large enough.
_SPLIT_PADS = (8, 32, MAX_SPLITS)
# Below this a program's start-up (page ids, then the first tiles) costs more than its tokens.
_MIN_SPLIT_TOKENS = 64
_PROGRAMS_PER_SM = 2
# This many one-warp programs of FP8 tiles fit in the shared memory of an SM, unless head_dim is
# 256.
_FP8_PROGRAMS_PER_SM = 7
# Numbers of a tile that a program of the merge loads at once.
_MERGE_TILE = 1024


class DecodeScratch(NamedTuple):
    """partial_out: [bs·Hq·splits, D] fp32; partial_lse: [bs·Hq·splits] fp32; any content."""

    partial_out: torch.Tensor
    partial_lse: torch.Tensor


class DecodeLaunch(NamedTuple):
    """Launch shape, fixed at capture. splits: programs that share one (request, KV head);
    block_tokens: tokens a tile; stages: tiles in flight."""

    splits: int
    block_tokens: int = 64
    num_warps: int = 2
    stages: int = 5


def decode_launch(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_selected_tokens: int,
    device: torch.device,
    kv_itemsize: int,
) -> DecodeLaunch:
    """One wave of programs of at least _MIN_SPLIT_TOKENS tokens each. `kv_itemsize` is the bytes of
    a number in the KV pool, 2 or 1."""
    width = triton.next_power_of_2(head_dim)
    if kv_itemsize == 1 and head_dim <= 128:
        programs_per_sm, tile, num_warps = _FP8_PROGRAMS_PER_SM, 4096 // width, 1
    else:
        programs_per_sm, tile, num_warps = _PROGRAMS_PER_SM, 8192 // width, 2
    wanted = programs_per_sm * sm_count(device) // (batch * num_kv_heads)
    useful = triton.cdiv(max_selected_tokens, _MIN_SPLIT_TOKENS)
    return DecodeLaunch(max(1, min(wanted, useful, MAX_SPLITS)), tile, num_warps)


def allocate_decode_scratch(parts: int, head_dim: int, device: torch.device) -> DecodeScratch:
    """Scratch that all layers and batch sizes may share. `parts` is the largest bs·Hq·splits of the
    launches that will use it."""
    return DecodeScratch(
        partial_out=torch.empty(parts, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(parts, dtype=torch.float32, device=device),
    )


@triton.jit
def _as_operand(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """`values` in DTYPE; FP8 ones become fp16 before they take the layout of the tensor cores. A
    register of that layout holds numbers of neighbouring tokens, which lie in different rows of
    shared memory. FP8 numbers would be gathered byte by byte; for 16-bit numbers the load itself
    transposes."""
    if values.dtype != tl.float8e4nv or INTERPRETED:
        return values.to(DTYPE)
    else:
        # Declared impure, or the compiler would move the layout conversion before it.
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}",
            "=r,=r,r",
            [values],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def _attend(
    queries: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    sink: tl.tensor,
    ROW: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Output in the shape of `queries`, and base-2 log-sum-exp, over the tokens [first, end).
    `scale` is a factor of the logits, of all rows or one of each as a column. `sink` holds one more
    logit of each row, base 2, whose value is 0; -inf for none."""
    columns = head_columns(D)
    largest = sink
    total = tl.where(sink > float("-inf"), 1.0, 0.0)
    acc = tl.zeros(queries.shape, tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        read = head_mask(inside[:, None], columns, D)
        page = tl.load(pages + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        at = slot[:, None] * ROW + columns[None, :]
        # The tensor cores take both operands in one dtype; it holds every FP8 number exactly.
        keys = tl.load(k_head + at, mask=read, other=0.0).to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys)) * scale
        logits = tl.where(inside[None, :], logits, float("-inf"))
        running = tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - running[:, None])
        shrink = tl.exp2(largest - running)
        # Slots past the end may hold anything, NaN too: read them as 0.
        values = _as_operand(tl.load(v_head + at, mask=read, other=0.0), queries.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        largest = running
    total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None], largest + tl.log2(total)


@triton.jit
def _half_queries(queries: tl.tensor, scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The queries [rows, D], of any range, in fp16, and the factors [rows, 1] of their logits. One
    instruction converts two FP8 numbers to fp16; bf16 takes three. A row is divided by the power of
    two below its largest number, so that only far smaller numbers are rounded."""
    largest = tl.max(tl.abs(queries.to(tl.float32)), axis=1)
    # The exponents of zero, of denormal and of the largest rows have no inverse.
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    return (queries.to(tl.float32) * down[:, None]).to(tl.float16), scale * up[:, None]


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


# `splits` differs by batch size. If it were a constant, kernels would be compiled for each value.
@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    splits: tl.tensor,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    AFTER_DECODE: tl.constexpr,
) -> None:
    """Program (row · Q_HEADS + head, block of columns) combines the splits of a query head."""
    head = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS_PAD)
    part = head.to(tl.int64) * splits + split
    if AFTER_DECODE:
        gdc_wait()
    lse = tl.load(partial_lse + part, mask=split < splits, other=float("-inf"))
    # Loaded together with `lse`, so a split without tokens may hold anything, NaN too.
    parts = tl.load(
        partial_out + part[:, None] * D + columns[None, :],
        mask=(split[:, None] < splits) & (columns[None, :] < D),
        other=0.0,
    )
    top = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(weight, axis=0)
    weighted = tl.where(weight[:, None] > 0.0, parts * weight[:, None], 0.0)
    merged = tl.sum(weighted, axis=0) / tl.where(total > 0.0, total, 1.0)
    at = out + (head // Q_HEADS).to(tl.int64) * out_stride + (head % Q_HEADS) * D + columns
    tl.store(at, merged.to(out.dtype.element_ty), mask=columns < D)


@triton.jit(
    do_not_specialize=["splits"], do_not_specialize_on_alignment=["seq_lens", "num_selected"]
)
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
    MMA_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVERY_PAGE: tl.constexpr,
    HAS_ATTN_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    AFTER_SELECT: tl.constexpr,
    BEFORE_MERGE: tl.constexpr,
) -> None:
    """Program (row · HEADS + head, split) attends to its share of the row's kept tokens."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    row = (pair // HEADS).to(tl.int64)
    head = pair % HEADS
    kept = _kept_tokens(num_selected, seq_lens, row, PAGE, EVERY_PAGE)
    share = _split_tokens(kept, splits, BLOCK)
    first = split * share
    member = tl.arange(0, MMA_ROWS)
    part = (pair.to(tl.int64) * GROUP + member) * splits + split
    # A row without tokens still has one program, which writes zeros.
    if (first < kept) | (split == 0):
        columns = head_columns(D)
        used = head_mask(member[:, None] < GROUP, columns, D)
        offsets = (head * GROUP + member[:, None]) * D + columns[None, :]
        queries = tl.load(q + row * q_stride + offsets, mask=used, other=0.0)
        if k_buffer.dtype.element_ty == tl.float8e4nv:
            operand, factor = _half_queries(queries, scale)
        else:
            operand, factor = queries, scale
        sink = tl.full((MMA_ROWS,), float("-inf"), tl.float32)
        if HAS_ATTN_SINKS:
            # Only split 0 includes the sinks; the merge combines it with the other splits.
            mine = (member < GROUP) & (split == 0)
            loaded = tl.load(sinks + head * GROUP + member, mask=mine, other=float("-inf"))
            sink = loaded.to(tl.float32) * 1.4426950408889634  # log2(e)
        if AFTER_SELECT:
            # The selection kernel starts this one after its own wait, so all that was read up to
            # here was written before.
            gdc_wait()
        if BEFORE_MERGE:
            # The merge starts up while this kernel runs, and waits for its end.
            gdc_launch_dependents()
        pages = page_ids + row * ids_row_stride + head * ids_head_stride
        end = tl.minimum(first + share, kept)
        k_head = k_buffer + head * D
        v_head = v_buffer + head * D
        result, lse = _attend(
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
        if SPLIT:
            tl.store(partial_lse + part, lse, mask=member < GROUP)
            tl.store(partial_out + part[:, None] * D + columns[None, :], result, mask=used)
        else:
            tl.store(out + row * out_stride + offsets, result.to(out.dtype.element_ty), mask=used)
    elif SPLIT:
        tl.store(partial_lse + part, float("-inf"), mask=member < GROUP)


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
    """Attend exactly to the selected pages, as `reference.sparse_decode` defines it and its
    arguments. With the page table for every head (`page_table[:, None].expand(bs, Hkv, max_pages)`)
    and without num_selected, the same launch is dense decode.

    Args:
        q: 1 to 16 query heads for each KV head.
        k_buffer, v_buffer: contiguous, in q's dtype or both in FP8 (e4m3).
        page_ids: int32; the head axis may be expanded.
        num_selected: int32; None for all pages of a row.
        seq_lens: int32 or int64.
        out: [bs, Hq, D] in q's dtype; written. A row of length 0 reads as 0.
        after_select: the launch before this one is `select_pages`, which wrote page_ids and new
            tokens; this one may start before it ends.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group = num_q_heads // num_kv_heads
    split, parts = launch.splits > 1, batch * num_q_heads * launch.splits
    assert_dense(k_buffer, v_buffer, sinks)
    assert q.stride(1) == out.stride(1) == head_dim
    assert group <= MAX_GROUP and num_q_heads == group * num_kv_heads
    assert page_ids.shape[:2] == (batch, num_kv_heads) and page_ids.stride(2) == 1
    assert not split or len(scratch.partial_lse) >= parts
    dependent = dependent_launch(q.device)
    merge_early, early = split and dependent, after_select and dependent
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
        MMA_ROWS=MAX_GROUP,
        BLOCK=launch.block_tokens,
        STAGES=launch.stages,
        EVERY_PAGE=num_selected is None,
        HAS_ATTN_SINKS=sinks is not None,
        SPLIT=split,
        AFTER_SELECT=early,
        BEFORE_MERGE=merge_early,
        num_warps=launch.num_warps,
        **launch_early(early),
    )
    if not split:
        return
    pad = next(pad for pad in _SPLIT_PADS if launch.splits <= pad)
    columns = min(triton.next_power_of_2(head_dim), max(32, _MERGE_TILE // pad))
    _merge_kernel[(batch * num_q_heads, triton.cdiv(head_dim, columns))](
        scratch.partial_out,
        scratch.partial_lse,
        out,
        out.stride(0),
        launch.splits,
        Q_HEADS=num_q_heads,
        D=head_dim,
        SPLITS_PAD=pad,
        COLUMNS=columns,
        AFTER_DECODE=merge_early,
        num_warps=4,
        **launch_early(merge_early),
    )
