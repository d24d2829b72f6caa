"""Other libraries doing the same work as our kernels, on the inputs of the kernel benchmark."""

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

    # A few hundred MB of inputs defeat the L2 cache.
    return [one(which) for which in range(min(len(case.q), 24))]


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
