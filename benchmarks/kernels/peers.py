"""Kernels of other libraries for the same work, launched on the inputs of the kernel benchmark."""

from collections.abc import Callable
from functools import partial

import torch

from sparrow_sglang.benchmarks.kernels.cases import (
    HEAD_DIM,
    NUM_KV_HEADS,
    RECENTS,
    SINKS,
    DecodeCase,
    Launch,
    SelectCase,
)
from sparrow_sglang.schedule import PAGE_SIZE


def _few(count: int) -> range:
    """Peers need not rotate through every set: a few hundred MB of inputs defeat the L2 cache."""
    return range(min(count, 24))


def torch_select(case: SelectCase) -> list[Launch]:
    """einsum over gathered landmarks, then topk: the cost of selection without a kernel of ours."""

    def one(which: int) -> Launch:
        query = case.q[which].view(case.shape.batch, NUM_KV_HEADS, -1, HEAD_DIM).float().mean(2)
        query = query.to(torch.bfloat16)

        def launch() -> None:
            gathered = case.pools.landmarks[0].squeeze(2)[case.tables[which]]
            scores = torch.einsum("bhd,bnhd->bhn", query, gathered)
            scores.topk(case.shape.budget_pages - SINKS - RECENTS, dim=-1, sorted=False)

        return launch

    return [one(which) for which in _few(len(case.q))]


def flashinfer_topk(case: SelectCase, tie_break: int) -> list[Launch]:
    """FlashInfer's exact radix top-k with page table transform; scoring is not included."""
    import flashinfer

    batch, pages = case.shape.batch, case.shape.pages
    rows = batch * NUM_KV_HEADS
    lengths = torch.full((rows,), pages, dtype=torch.int32, device="cuda")
    row_to_batch = torch.arange(batch, device="cuda", dtype=torch.int32)
    row_to_batch = row_to_batch.repeat_interleave(NUM_KV_HEADS)

    def one(which: int) -> Launch:
        scores = torch.randn(rows, pages, device="cuda")
        return lambda: flashinfer.top_k_page_table_transform(
            scores,
            case.tables[which],
            lengths,
            case.shape.budget_pages,
            row_to_batch=row_to_batch,
            tie_break=tie_break,
        )

    return [one(which) for which in _few(len(case.q))]


def minimax_select(case: SelectCase) -> list[Launch]:
    """SGLang's MiniMax-M3 block scoring and top-k, with the landmarks as its key cache.

    It scores blocks of 16 entries by their maximum and keeps 16 blocks, so it does less selection
    than ours over the same bytes.
    """
    from sglang.kernels.ops.attention.minimax_sparse.decode.flash_with_topk_idx import (
        flash_decode_with_topk_idx,
    )

    batch, pages = case.shape.batch, case.shape.pages
    lengths = torch.full((batch,), pages, dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)

    def one(which: int) -> Launch:
        return lambda: flash_decode_with_topk_idx(
            q=case.q[which][:, :: case.shape.group].contiguous(),
            sink=None,
            k_cache=case.pools.landmarks[0].squeeze(2),
            v_cache=None,
            req_to_token=case.tables[which],
            seq_lens=lengths,
            max_seqlen=pages,
            slot_ids=rows,
            block_size=16,
            topk=16,
            init_blocks=1,
            local_blocks=1,
            disable_index_value=True,
        )

    return [one(which) for which in _few(len(case.q))]


def flashinfer_decode(case: DecodeCase) -> list[Launch]:
    """FlashInfer's paged decode, one request per (request, KV head), over strided pool views."""
    import flashinfer

    heads, group = NUM_KV_HEADS, case.shape.group
    rows = case.shape.batch * heads
    per_row = case.counts.repeat_interleave(heads).cpu()
    last = ((case.seq_lens - 1) % PAGE_SIZE + 1).repeat_interleave(heads).int().cpu()
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), per_row.cumsum(0).int()])
    width = case.page_ids[0].shape[-1]
    used = torch.arange(width)[None] < per_row[:, None]
    head = torch.arange(heads, dtype=torch.int32, device="cuda")[None, :, None]

    def view(pool: torch.Tensor) -> torch.Tensor:
        entries = (pool.shape[0] - PAGE_SIZE) * heads
        strides = (HEAD_DIM, heads * HEAD_DIM, HEAD_DIM, 1)
        return pool.as_strided((entries, PAGE_SIZE, 1, HEAD_DIM), strides)

    def one(which: int) -> Launch:
        workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=group >= 4
        )
        entries = (case.page_ids[which] * (PAGE_SIZE * heads) + head).view(rows, width)
        wrapper.plan(
            indptr,
            entries[used.to(entries.device)].int(),
            last,
            group,
            1,
            HEAD_DIM,
            PAGE_SIZE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            sm_scale=HEAD_DIM**-0.5,
        )
        query = case.q[which].view(rows, group, HEAD_DIM)
        pools = (view(case.pools.k), view(case.pools.v))
        return lambda: wrapper.run(query, pools)

    launches = [one(which) for which in range(min(len(case.q), 6))]
    wanted = case.expected(0)
    got = launches[0]()
    assert isinstance(got, torch.Tensor)
    got = got.view(case.q[0].shape)[: len(wanted)].float()
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= 5e-3:
        raise ValueError(f"the peer's relative error is {error:.1e}: expected at most 5e-3")
    return launches


def minimax_decode(case: DecodeCase) -> list[Launch]:
    """SGLang's MiniMax-M3 block-sparse GQA decode over the same pages."""
    from sglang.kernels.ops.attention.minimax_sparse.decode.topk_sparse import (
        flash_decode_with_gqa_share_sparse,
    )

    batch = case.shape.batch
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    # The kernel takes logical block ids and one table for all heads. With an identity table over
    # all slots, a logical block id is a page id.
    pages = len(case.pools.k) // PAGE_SIZE
    slots = torch.arange(pages * PAGE_SIZE, device="cuda", dtype=torch.int32)
    req_to_token = slots[None].expand(batch, -1)
    lengths = torch.full((batch,), pages * PAGE_SIZE, dtype=torch.int32, device="cuda")

    def one(which: int) -> Launch:
        blocks = case.page_ids[which].transpose(0, 1).contiguous()
        return lambda: flash_decode_with_gqa_share_sparse(
            q=case.q[which],
            sink=None,
            k_cache=case.pools.k,
            v_cache=case.pools.v,
            req_to_token=req_to_token,
            seq_lens=lengths,
            slot_ids=rows,
            block_size=PAGE_SIZE,
            topk_idx=blocks,
        )

    return [one(which) for which in _few(len(case.q))]


SELECT_PEERS: dict[str, Callable[[SelectCase], list[Launch]]] = {
    "torch einsum + topk": torch_select,
    "flashinfer top-k only": partial(flashinfer_topk, tie_break=0),
    "flashinfer top-k only, ties low": partial(flashinfer_topk, tie_break=1),
    "sglang minimax score + top-16": minimax_select,
}
DECODE_PEERS: dict[str, Callable[[DecodeCase], list[Launch]]] = {
    "flashinfer": flashinfer_decode,
    "sglang minimax sparse": minimax_decode,
}
