"""Score every page of a request by its landmark and keep the best: one launch a layer.

In: queries, landmarks, the step's page table. Out: physical page ids in ascending logical order
and how many of them count; the budget is looked up on the device, so nothing is planned.
"""

from typing import NamedTuple

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
    group_size,
    sm_count,
)
from sparrow_sglang.attention_backends.kernels.landmark import page_mean

# The compaction packs two page counts into one int32, 15 bits for the upper one.
MAX_PAGES = 32767
_TILE_BYTES = 16384


class Budgets(NamedTuple):
    """The KV budget tables that the kernel reads; a row's budget depends on its length only.

    table: [num_schedules, num_bins] int32, total pages to keep in a bin, sinks and recent included;
    bin_pages: [num_schedules] int32, pages a bin (the last bin has no end);
    schedule_ids: [>= bs] int32, the table row of each request.
    """

    table: torch.Tensor
    bin_pages: torch.Tensor
    schedule_ids: torch.Tensor


class SelectScratch(NamedTuple):
    """keys: [rows, max_pages] int32, any content; arrivals: [rows] int32, zero between launches."""

    keys: torch.Tensor
    arrivals: torch.Tensor


class SelectLaunch(NamedTuple):
    """Launch shape, fixed at capture.

    splits: programs that score one (request, KV head); block_pages: landmarks a tile;
    radix: thresholds tried in one pass of the search; stages: landmark tiles in flight.
    """

    splits: int
    block_pages: int
    num_warps: int = 4
    stages: int = 4
    radix: int = 8


def select_launch(
    batch: int, num_kv_heads: int, head_dim: int, max_pages: int, device: torch.device
) -> SelectLaunch:
    """Programs enough to fill every SM four times over, each with at least one tile of pages."""
    block_pages = _TILE_BYTES // (2 * head_dim)
    rows = batch * num_kv_heads
    wanted = triton.cdiv(4 * sm_count(device), rows)
    splits = max(1, min(wanted, triton.cdiv(max_pages, block_pages), 32))
    return SelectLaunch(splits=splits, block_pages=block_pages)


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
def _order_keys(scores: tl.tensor) -> tl.tensor:
    """int32 bits of uint32 keys that sort as the fp32 scores do, all above 0; NaN sorts lowest."""
    largest: tl.constexpr = 3.4028234663852886e38
    scores = tl.where(scores != scores, -largest, scores)
    scores = tl.minimum(tl.maximum(scores, -largest), largest)
    # -0.0 and 0.0 are a tie.
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -2147483648)


@triton.jit
def _load_keys(keys: tl.tensor, index: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """uint32 keys of the scored pages [first, end); 0, below every key, elsewhere."""
    # .cg: another SM may have written them.
    bits = tl.load(
        keys + index, mask=(index >= first) & (index < end), other=0, cache_modifier=".cg"
    )
    return bits.to(tl.uint32, bitcast=True)


@triton.jit
def _score_pages(
    group_query: tl.tensor,
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
    """Write the keys of pages [first, end)."""
    columns = tl.arange(0, D)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        inside = index < end
        page = tl.load(pages + index, mask=inside, other=0).to(tl.int64)
        tile = tl.load(
            head_landmarks + page[:, None] * page_stride + columns[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        score = tl.sum(tile.to(tl.float32) * group_query[None, :], axis=1)
        tl.store(keys + index, _order_keys(score), mask=inside)


@triton.jit
def _find_threshold(
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    wanted: tl.tensor,
    RADIX: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Bracket [low, high) of keys that holds the wanted-th largest, and how many lie above it.

    Each pass cuts the bracket in RADIX parts and counts the keys above every cut at once: a
    block-wide reduction costs more than the compares, so several cuts share one. It stops as soon
    as the keys from `low` up are exactly the wanted ones, some 18 of the 32 bits for thousands of
    scores; only ties go down to the last bit. The first CHUNK keys stay in registers.
    """
    ladder = tl.arange(0, RADIX)
    lane = tl.arange(0, CHUNK)[None, :]
    resident = _load_keys(keys, lane, first, end)
    low = tl.full((), 1, tl.uint32)
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    from_low = end - first
    from_high = from_low * 0
    while (wanted > 0) & (from_low != wanted) & (high - low > 1):
        step = tl.maximum((high - low) // RADIX, 1)
        cuts = low + step * ladder.to(tl.uint32)
        counts = tl.sum((resident >= cuts[:, None]).to(tl.int32), axis=1)
        for base in range(CHUNK, end, CHUNK):
            more = _load_keys(keys, base + lane, first, end)
            counts += tl.sum((more >= cuts[:, None]).to(tl.int32), axis=1)
        enough = counts >= wanted
        passed = tl.sum(enough.to(tl.int32), axis=0)
        from_low = tl.min(tl.where(enough, counts, 0x7FFFFFFF), axis=0)
        from_high = tl.maximum(from_high, tl.max(tl.where(enough, 0, counts), axis=0))
        next_cut = low + step * passed.to(tl.uint32)
        low = next_cut - step
        if passed < RADIX:
            high = next_cut
    return low, high, from_high


@triton.jit
def _store_selected(
    keys: tl.tensor,
    pages: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    num_selected: tl.tensor,
    SINKS: tl.constexpr,
    RECENTS: tl.constexpr,
    RADIX: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the physical ids of the kept pages in ascending logical order."""
    first = num_pages * 0 + SINKS
    end = num_pages - RECENTS
    wanted = num_selected - SINKS - RECENTS
    low, high, above = _find_threshold(keys, first, end, wanted, RADIX, CHUNK)
    # Keys inside the bracket tie (or are all wanted): the first of them fill up the budget.
    room = wanted - above
    carry = num_pages * 0
    for base in range(0, num_pages, CHUNK):
        index = base + tl.arange(0, CHUNK)
        key = _load_keys(keys, index, first, end)
        always = (index < SINKS) | ((index >= end) & (index < num_pages))
        certain = always | (key >= high)
        tied = (key >= low) & (key < high)
        # One scan carries both counts: certain pages below, tied ones in the upper half.
        packed = certain.to(tl.int32) + (tied.to(tl.int32) << 16)
        before = tl.cumsum(packed, axis=0) - packed + carry
        tied_before = before >> 16
        keep = certain | (tied & (tied_before < room))
        slot = (before & 0xFFFF) + tl.minimum(tied_before, room)
        page = tl.load(pages + index, mask=keep, other=0)
        tl.store(selected + slot, page, mask=keep)
        carry += tl.sum(packed, axis=0)


@triton.jit
def _select_kernel(
    q: tl.tensor,
    k_buffer: tl.tensor,
    landmarks: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    budget_table: tl.tensor,
    bin_pages: tl.tensor,
    schedule_ids: tl.tensor,
    page_ids: tl.tensor,
    counts: tl.tensor,
    keys: tl.tensor,
    arrivals: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    keys_stride: tl.tensor,
    width: tl.tensor,
    NUM_BINS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SINKS: tl.constexpr,
    RECENTS: tl.constexpr,
    UPDATE_LANDMARK: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RADIX: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (row · HEADS + head, split) scores its share; the last one of a row selects."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    row = (pair // HEADS).to(tl.int64)
    head = pair % HEADS
    columns = tl.arange(0, D)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    num_pages = tl.cdiv(seq_len, PAGE)
    schedule = tl.load(schedule_ids + row)
    page_bin = tl.minimum(num_pages // tl.load(bin_pages + schedule), NUM_BINS - 1)
    budget = tl.load(budget_table + schedule * NUM_BINS + page_bin)
    num_selected = tl.minimum(num_pages, budget)
    pages = page_table + row * table_stride
    selected = page_ids + pair.to(tl.int64) * width
    row_keys = keys + pair.to(tl.int64) * keys_stride

    if split == 0:
        if head == 0:
            tl.store(counts + row, num_selected)
        if UPDATE_LANDMARK:
            # The page that this token filled is the most recent one: kept, never scored now.
            if (seq_len > 0) & (seq_len % PAGE == 0):
                page = tl.load(pages + num_pages - 1).to(tl.int64)
                at = head * D + columns
                mean = page_mean(k_buffer, page * PAGE, at, columns < D, HEADS * D, PAGE)
                target = landmarks + page * (HEADS * D) + at
                tl.store(target, mean.to(landmarks.dtype.element_ty))

    if num_pages <= budget:
        if split == 0:
            for base in range(0, num_pages, CHUNK):
                index = base + tl.arange(0, CHUNK)
                page = tl.load(pages + index, mask=index < num_pages, other=0)
                tl.store(selected + index, page, mask=index < num_pages)
    else:
        middle = num_pages - SINKS - RECENTS
        share = tl.cdiv(tl.cdiv(middle, SPLITS), BLOCK) * BLOCK
        active = tl.cdiv(middle, share)
        if split < active:
            member = tl.arange(0, GROUP_PAD)
            group = tl.load(
                q + row * q_stride + (head * GROUP + member[:, None]) * D + columns[None, :],
                mask=member[:, None] < GROUP,
                other=0.0,
            )
            group_query = tl.sum(group.to(tl.float32), axis=0) / GROUP
            first = SINKS + split * share
            end = tl.minimum(first + share, num_pages - RECENTS)
            head_landmarks = landmarks + head * D
            _score_pages(
                group_query, head_landmarks, pages, row_keys, first, end, HEADS * D, D, BLOCK, STAGES
            )
            # Every thread's keys must be out before this program reports them or reads them back.
            tl.debug_barrier()
            last = True
            if SPLITS > 1:
                arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
                last = arrived == active - 1
            if last:
                if SPLITS > 1:
                    # Zero again for the next launch, or the next replay of a graph.
                    tl.store(arrivals + pair, 0)
                _store_selected(
                    row_keys, pages, selected, num_pages, num_selected, SINKS, RECENTS, RADIX, CHUNK
                )


def select_pages(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    landmarks: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budgets: Budgets,
    page_ids: torch.Tensor,
    counts: torch.Tensor,
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
        k_buffer: [num_slots, Hkv, D], contiguous; the current token's key is in it already.
        landmarks: [num_pages, Hkv, D] in the dtype of the keys, contiguous; with update_landmark
            the landmark of each page that the current token filled is written.
        page_table: [bs, max_pages] int32, physical pages.
        seq_lens: [bs] int32 or int64, the current token included.
        budgets: KV budget tables; a budget holds at least sink_pages + recent_pages.
        page_ids: [bs, Hkv, K] int32, contiguous, K at least the largest budget that occurs;
            entries past a row's count are left as they are.
        counts: [bs] int32, pages kept by each row.
        recent_pages: at least 1: the page being written is never scored.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group = group_size(num_q_heads, num_kv_heads)
    max_pages = page_table.shape[1]
    check_member("page_size", page_size, PAGE_SIZES)
    check_member("head_dim", head_dim, HEAD_DIMS)
    if sink_pages < 0 or recent_pages < 1:
        raise ValueError(
            f"sink_pages={sink_pages}, recent_pages={recent_pages}: expected >= 0 and >= 1"
        )
    if max_pages > min(MAX_PAGES, scratch.keys.shape[1]):
        raise ValueError(
            f"page_table has {max_pages} columns: expected at most {MAX_PAGES}, and the scratch "
            f"holds {scratch.keys.shape[1]}; allocate it with max_pages={max_pages}"
        )
    if scratch.arrivals.shape[0] < batch * num_kv_heads:
        raise ValueError(
            f"scratch holds {scratch.arrivals.shape[0]} rows: expected at least bs·Hkv="
            f"{batch * num_kv_heads}; allocate it with max_batch={batch}"
        )
    check_tensor("q", q, (batch, num_q_heads, head_dim), KV_DTYPES)
    check_tensor("k_buffer", k_buffer, (None, num_kv_heads, head_dim), KV_DTYPES)
    check_tensor("landmarks", landmarks, (None, num_kv_heads, head_dim), (k_buffer.dtype,))
    check_tensor("page_table", page_table, (batch, None), (torch.int32,))
    check_tensor("seq_lens", seq_lens, (batch,), INDEX_DTYPES)
    check_tensor("page_ids", page_ids, (batch, num_kv_heads, None), (torch.int32,))
    check_tensor("counts", counts, (batch,), (torch.int32,))
    for name, tensor in (("k_buffer", k_buffer), ("landmarks", landmarks), ("page_ids", page_ids)):
        check_contiguous(name, tensor)
    if q.stride(1) != head_dim:
        raise ValueError(f"q has strides {q.stride()}: expected heads side by side in each row")
    _select_kernel[(batch * num_kv_heads, launch.splits)](
        q,
        k_buffer,
        landmarks,
        page_table,
        seq_lens,
        budgets.table,
        budgets.bin_pages,
        budgets.schedule_ids,
        page_ids,
        counts,
        scratch.keys,
        scratch.arrivals,
        q.stride(0),
        page_table.stride(0),
        scratch.keys.stride(0),
        page_ids.shape[2],
        NUM_BINS=budgets.table.shape[1],
        HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page_size,
        SINKS=sink_pages,
        RECENTS=recent_pages,
        UPDATE_LANDMARK=update_landmark,
        GROUP_PAD=max(triton.next_power_of_2(group), launch.num_warps * 256 // head_dim),
        SPLITS=launch.splits,
        BLOCK=launch.block_pages,
        STAGES=launch.stages,
        RADIX=launch.radix,
        CHUNK=min(triton.next_power_of_2(max_pages), 2048),
        num_warps=launch.num_warps,
    )
