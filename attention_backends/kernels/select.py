"""Store the new token of a request, score all pages by their landmarks and keep the best: one
launch a layer."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparrow_sglang.attention_backends.kernel_limits import MAX_PAGES
from sparrow_sglang.attention_backends.kernels.common import (
    assert_dense,
    dependent_launch,
    head_columns,
    head_mask,
    launch_early,
    sm_count,
)
from sparrow_sglang.attention_backends.kernels.int4_scores import query_digits, score_int4_pages
from sparrow_sglang.attention_backends.kernels.landmark import (
    kernel_tensors,
    update_landmark_of_last_page,
)
from sparrow_sglang.attention_backends.kernels.topk import order_keys, store_selected
from sparrow_sglang.attention_backends.landmarks import Landmarks

# The smallest N of the tensor cores: three columns hold the query, the others are 0.
_MMA_COLUMNS = 16
# Pages of a row that the search keeps in registers at most.
_MAX_CHUNK = 2048
# Two programs an SM, with three tiles each in flight, cover the latency of gathered landmarks.
_PROGRAMS_PER_SM = 2
# Pages of an int4 tile, by the largest head dimension for which registers hold their landmarks. It
# has as many where a page has eight landmarks: in a smaller tile, those of a page would be compared
# across warps.
_INT4_PAGES = {128: 128, 256: 32}
# Triton divides the stages between a tile and the page ids loaded before it: with fewer than five,
# the load of a tile is issued only when the previous tile has been scored.
_INT4_STAGES = 5


class NewTokens(NamedTuple):
    """KV of each row's current token, [bs, Hkv, D] in the pool's dtype with the heads of a row next
    to each other, and the [bs] slots of the pool where it belongs."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor


class SelectScratch(NamedTuple):
    """keys: [rows, max_pages] int32, any content; arrivals: [rows] int32, zero between launches."""

    keys: torch.Tensor
    arrivals: torch.Tensor


class SelectLaunch(NamedTuple):
    """Launch shape, fixed at capture. splits: programs that score one (request, KV head);
    block_pages: pages a tile; stages: landmark tiles in flight."""

    splits: int
    block_pages: int
    num_warps: int = 4
    stages: int = 3


def select_launch(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_pages: int,
    device: torch.device,
    int4: bool = False,
) -> SelectLaunch:
    """One wave of programs: long rows are split, many rows get smaller tiles instead. With `int4`,
    landmarks are int4 codes, not means in 16 bits."""
    rows, sms = batch * num_kv_heads, sm_count(device)
    slots = _PROGRAMS_PER_SM * sms
    if int4:
        block_pages = next(pages for dim, pages in _INT4_PAGES.items() if head_dim <= dim)
        # The registers of such a tile leave room for little more than one program an SM.
        splits = min(triton.cdiv(sms, rows), triton.cdiv(max_pages, block_pages))
        return SelectLaunch(splits=splits, block_pages=block_pages, stages=_INT4_STAGES)
    if rows > slots:
        return SelectLaunch(splits=1, block_pages=max(16, 8192 // triton.next_power_of_2(head_dim)))
    block_pages = max(16, 16384 // triton.next_power_of_2(head_dim))
    return SelectLaunch(
        splits=min(slots // rows, triton.cdiv(max_pages, block_pages)), block_pages=block_pages
    )


def allocate_select_scratch(
    max_batch: int, num_kv_heads: int, max_pages: int, device: torch.device
) -> SelectScratch:
    """Scratch for up to max_batch requests; every layer and every batch size may share it."""
    rows = max_batch * num_kv_heads
    # Rows of whole 16-byte vectors keep the key loads wide.
    width = triton.cdiv(max_pages, 16) * 16
    return SelectScratch(
        keys=torch.empty(rows, width, dtype=torch.int32, device=device),
        arrivals=torch.zeros(rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _split_query(group_query: tl.tensor, COLUMNS: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The fp32 query [D] as a [D, COLUMNS] operand of the tensor cores, exact to fp32. Three 16-bit
    numbers hold an fp32 mantissa, so the sum over the columns of a product is the product with the
    unrounded query, accumulated in fp32."""
    high = group_query.to(DTYPE)
    rest = group_query - high.to(tl.float32)
    middle = rest.to(DTYPE)
    low = (rest - middle.to(tl.float32)).to(DTYPE)
    column = tl.arange(0, COLUMNS)[None, :]
    split = tl.where(column == 0, high[:, None], tl.zeros_like(high)[:, None])
    split = tl.where(column == 1, middle[:, None], split)
    return tl.where(column == 2, low[:, None], split)


@triton.jit
def _score_pages(
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
    """Write the keys of pages [first, end), each of which has one landmark of D numbers. `query` is
    the group's mean query as `split_query` gives it."""
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


# `splits` and the alignment of the others differ by batch size. If they were constants, a kernel
# would be compiled for each value.
@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["new_slots", "seq_lens", "num_selected"],
)
def _select_kernel(
    q: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    new_slots: tl.tensor,
    landmarks: tl.tensor,
    scales: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    num_selected: tl.tensor,
    page_ids: tl.tensor,
    keys: tl.tensor,
    arrivals: tl.tensor,
    q_stride: tl.tensor,
    new_keys_stride: tl.tensor,
    new_values_stride: tl.tensor,
    table_stride: tl.tensor,
    keys_stride: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    STORE: tl.constexpr,
    UPDATE_LANDMARK: tl.constexpr,
    LANDMARKS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    MMA_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row · HEADS + head, split) scores its share; the first split stores the new token,
    the last one to finish selects.
    LANDMARKS: number of int4 landmarks of a page, in `landmarks` and `scales`; 0 where `landmarks`
    are means of whole pages."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    row = (pair // HEADS).to(tl.int64)
    head = pair % HEADS
    columns = head_columns(D)
    if EARLY:
        gdc_wait()
    # A small batch mostly waits for the loads before the first landmark: they are issued together,
    # before any branch.
    keep = tl.load(num_selected + row)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    q_group = q + row * q_stride + head * GROUP * D
    if LANDMARKS == 0:
        member = tl.arange(0, GROUP_PAD)
        group = tl.load(
            q_group + member[:, None] * D + columns[None, :],
            mask=head_mask(member[:, None] < GROUP, columns, D),
            other=0.0,
        )
    else:
        # Tensor cores take 8 columns or more.
        COLUMNS: tl.constexpr = max(4 * GROUP_PAD, 8)
        digits, offset, unit = query_digits(q_group, GROUP, COLUMNS, D)
    if STORE:
        stores = (columns < D) & (split == 0)
        slot = tl.load(new_slots + row).to(tl.int64)
        at = head * D + columns
        new_key = tl.load(new_keys + row * new_keys_stride + at, mask=stores)
        new_value = tl.load(new_values + row * new_values_stride + at, mask=stores)
    num_pages = tl.cdiv(seq_len, PAGE)
    pages = page_table + row * table_stride
    selected = page_ids + pair.to(tl.int64) * width
    row_keys = keys + pair.to(tl.int64) * keys_stride
    if STORE:
        # Slot 0 is for padding, whose rows may hold NaN. Attention kernels may read it in masked
        # lanes and multiply it by 0, so it stays as it is, as in SGLang from 0.5.20 on.
        stores &= slot != 0
        tl.store(k_buffer + slot * HEADS * D + at, new_key, mask=stores)
        tl.store(v_buffer + slot * HEADS * D + at, new_value, mask=stores)
    if UPDATE_LANDMARK:
        if split == 0:
            if STORE:
                # Other threads of this program read the new key.
                tl.debug_barrier()
            update_landmark_of_last_page(
                k_buffer,
                landmarks,
                scales,
                pages,
                seq_len,
                head,
                HEADS,
                D,
                PAGE,
                LANDMARKS,
            )

    if keep >= num_pages:
        if split == 0:
            for base in range(0, num_pages, CHUNK):
                index = base + tl.arange(0, CHUNK)
                page = tl.load(pages + index, mask=index < num_pages, other=0)
                tl.store(selected + index, page, mask=index < num_pages)
    else:
        middle = num_pages - SINK_PAGES - RECENT_PAGES
        share = tl.cdiv(tl.cdiv(middle, splits), BLOCK) * BLOCK
        active = tl.cdiv(middle, share)
        if split < active:
            first = SINK_PAGES + split * share
            end = tl.minimum(first + share, num_pages - RECENT_PAGES)
            if LANDMARKS > 0:
                score_int4_pages(
                    digits,
                    offset,
                    unit,
                    landmarks,
                    scales,
                    head,
                    pages,
                    row_keys,
                    first,
                    end,
                    HEADS,
                    D,
                    LANDMARKS,
                    BLOCK,
                    STAGES,
                )
            else:
                mean_query = tl.sum(group.to(tl.float32), axis=0) / GROUP
                query = _split_query(mean_query, MMA_COLUMNS, landmarks.dtype.element_ty)
                head_landmarks = landmarks + head * D
                _score_pages(
                    query, head_landmarks, pages, row_keys, first, end, HEADS * D, D, BLOCK, STAGES
                )
            if EARLY:
                # Attention starts up while the last programs select, and waits for them.
                gdc_launch_dependents()
            # Every thread must have stored its keys before this program reports its arrival or
            # reads them back.
            tl.debug_barrier()
            last = active == 1
            if active > 1:
                arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
                last = arrived == active - 1
            if last:
                if active > 1:
                    # Reset the counter for the next launch, or the next replay of a graph.
                    tl.store(arrivals + pair, 0)
                store_selected(
                    row_keys, pages, selected, num_pages, keep, SINK_PAGES, RECENT_PAGES, CHUNK
                )


def select_pages(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    landmarks: Landmarks,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_selected: torch.Tensor,
    page_ids: torch.Tensor,
    new_tokens: NewTokens | None = None,
    *,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    scratch: SelectScratch,
    launch: SelectLaunch,
    update_landmark: bool = True,
) -> None:
    """Choose the pages of one decode step of one layer, as `reference.select_pages` defines them.

    Args:
        q: [bs, Hq, D], queries after RoPE; 1 to 16 query heads for each KV head.
        k_buffer, v_buffer: [num_slots, Hkv, D], contiguous.
        landmarks: with update_landmark those of each page that the current token filled are
            written.
        page_table: [bs, max_pages] int32, physical pages.
        seq_lens: [bs] int32 or int64, the current token included.
        num_selected: [bs] int32, pages to keep of each row: all of them, or at least
            sink_pages + recent_pages.
        page_ids: [bs, Hkv, K] int32, contiguous, K at least the largest count; entries past a
            row's count are left as they are.
        new_tokens: written to the buffers first, except to slot 0, which is for padding; None if
            they are in them already.
        recent_pages: at least 1: the page being written is never scored.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group, rows = num_q_heads // num_kv_heads, batch * num_kv_heads
    max_pages = page_table.shape[1]
    new = new_tokens or NewTokens(k_buffer, v_buffer, seq_lens)
    values, scales, count = kernel_tensors(landmarks)
    assert_dense(k_buffer, v_buffer, page_ids, new.slots, values, scales)
    assert q.stride(1) == head_dim and num_q_heads == group * num_kv_heads and recent_pages > 0
    assert max_pages <= min(MAX_PAGES, scratch.keys.shape[1]) and rows <= len(scratch.arrivals)
    assert new.keys.stride()[1:] == new.values.stride()[1:] == (head_dim, 1)
    assert new.keys.dtype == k_buffer.dtype and new.values.dtype == v_buffer.dtype
    early = dependent_launch(q.device)
    _select_kernel[(rows, launch.splits)](
        q,
        k_buffer,
        v_buffer,
        *new,
        values,
        scales,
        page_table,
        seq_lens,
        num_selected,
        page_ids,
        scratch.keys,
        scratch.arrivals,
        q.stride(0),
        new.keys.stride(0),
        new.values.stride(0),
        page_table.stride(0),
        scratch.keys.stride(0),
        page_ids.shape[2],
        launch.splits,
        HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page_size,
        SINK_PAGES=sink_pages,
        RECENT_PAGES=recent_pages,
        STORE=new_tokens is not None,
        UPDATE_LANDMARK=update_landmark,
        LANDMARKS=count,
        GROUP_PAD=triton.next_power_of_2(group),
        MMA_COLUMNS=_MMA_COLUMNS,
        BLOCK=launch.block_pages,
        STAGES=launch.stages,
        CHUNK=min(triton.next_power_of_2(max_pages), _MAX_CHUNK),
        EARLY=early,
        num_warps=launch.num_warps,
        **launch_early(early),
    )
