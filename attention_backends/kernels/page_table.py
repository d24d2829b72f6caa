"""Snapshot of a step's requests for its kernels: physical pages, and how many of them to keep. It
is taken by the first kernel of a step, because SGLang may write `req_to_token` again while the
others still run."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

NO_CAP = 2**31 - 1
EVERY_PAGE = -1
"""Cap of a request that keeps all pages."""
_BLOCK = 256


class Budgets(NamedTuple):
    """KV budget tables on the device; a request's budget depends on its length and its option.
    table: [num_bins] int32, total pages to keep in a bin, sinks and recent included;
    bin_pages: [1] int32, pages a bin (the last bin has no end);
    caps: [num_requests] int32, the most pages that a request may keep, NO_CAP or EVERY_PAGE;
    dense_pages: [1] int32: a request that holds no more, and has no cap, keeps all pages."""

    table: torch.Tensor
    bin_pages: torch.Tensor
    caps: torch.Tensor
    dense_pages: torch.Tensor


# Lengths of drafts are one of several rows.
@triton.jit(do_not_specialize_on_alignment=["req_pool_indices", "seq_lens"])
def _snapshot_kernel(
    req_to_token: tl.tensor,
    req_pool_indices: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    budget_table: tl.tensor,
    bin_pages: tl.tensor,
    caps: tl.tensor,
    dense_pages: tl.tensor,
    num_selected: tl.tensor,
    req_stride: tl.tensor,
    table_stride: tl.tensor,
    table_width: tl.tensor,
    PAGE: tl.constexpr,
    NUM_BINS: tl.constexpr,
    WITH_BUDGETS: tl.constexpr,
    UNCAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, block) writes BLOCK entries of one row, those below the row's page count."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    held = tl.cdiv(tl.load(seq_lens + row).to(tl.int32), PAGE)
    request = tl.load(req_pool_indices + row).to(tl.int64)
    if WITH_BUDGETS:
        if block == 0:
            page_bin = tl.minimum(held // tl.load(bin_pages), NUM_BINS - 1)
            cap = tl.load(caps + request)
            budget = tl.minimum(tl.load(budget_table + page_bin), cap)
            whole = (cap < 0) | ((cap == UNCAPPED) & (held <= tl.load(dense_pages)))
            tl.store(num_selected + row, tl.where(whole, held, tl.minimum(budget, held)))
    pages = tl.minimum(held, table_width)
    if block * BLOCK < pages:
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < pages
        slot = tl.load(req_to_token + request * req_stride + index * PAGE, mask=mask, other=0)
        tl.store(page_table + row.to(tl.int64) * table_stride + index, slot // PAGE, mask=mask)


def snapshot_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_size: int,
    budgets: Budgets | None = None,
    num_selected: torch.Tensor | None = None,
) -> None:
    """Copy each request's physical pages out of `req_to_token`, and look up its KV budget.

    Args:
        req_to_token: [num_requests, max_context] int32 slots, page-aligned runs.
        req_pool_indices: [bs] int32 or int64, rows of req_to_token.
        seq_lens: [bs] int32 or int64.
        page_table: [>= bs, max_pages] int32; entries below each row's page count are written.
        budgets: None, as is `num_selected`, where no page will be selected, as in a prefill.
        num_selected: [bs] int32; written: pages that a sparse layer keeps of each row.
    """
    batch = seq_lens.shape[0]
    assert page_table.shape[0] >= batch and (budgets is None) == (num_selected is None)
    assert num_selected is None or num_selected.shape == (batch,)
    _snapshot_kernel[(batch, triton.cdiv(page_table.shape[1], _BLOCK))](
        req_to_token,
        req_pool_indices,
        seq_lens,
        page_table,
        *(budgets or [page_table] * len(Budgets._fields)),
        page_table if num_selected is None else num_selected,
        req_to_token.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        PAGE=page_size,
        NUM_BINS=1 if budgets is None else len(budgets.table),
        WITH_BUDGETS=num_selected is not None,
        UNCAPPED=NO_CAP,
        BLOCK=_BLOCK,
        num_warps=4,
    )
