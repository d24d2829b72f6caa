"""One layer of a verification: several rows of each request at once, against one row of each."""

from collections.abc import Callable
from typing import Any

import torch

from sparrow_sglang.attention_backends.decode_buffers import DecodeShape
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.benchmarks.kernels.cases import (
    HEAD_DIM,
    NUM_KV_HEADS,
    Pools,
    Shape,
    replay_us,
)
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule

# With queries that differ by this share, four rows select 1.3 times the pages of one over random
# landmarks, as consecutive tokens of a response do.
_NOISE = 0.16


def measure_rows(pools: Pools, shape: Shape, schedule: BudgetSchedule, rows: int) -> dict[str, Any]:
    """Microseconds of a layer's selection and attention with `rows` rows for each request.

    They are checked against the same rows as requests of their own.
    """
    limit = len(pools.k) // PAGE_SIZE - 1
    heads = NUM_KV_HEADS * shape.group
    decode_shape = DecodeShape.of(
        schedule, heads, NUM_KV_HEADS, HEAD_DIM, shape.context, pools.k.itemsize
    )
    budgets = BudgetTable(LoadedSchedules.of([schedule]), shape.batch, "cuda")
    requests = torch.arange(shape.batch, device="cuda").repeat_interleave(rows)
    lengths = shape.context - 8 + torch.arange(rows, device="cuda").repeat(shape.batch)

    def planned(which: int, rows_per_request: int) -> TritonPagedDecode:
        pages = shape.page_table(pools, which, limit)
        slots = pages[..., None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")
        step = TritonPagedDecode(budgets, slots.int().flatten(1), decode_shape)
        step.reserve(len(requests))
        step.plan_decode(requests, lengths, None, rows_per_request=rows_per_request)
        return step

    def launch(step: TritonPagedDecode, q: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: step.decode(q, pools.k, pools.v, pools.landmarks, 0, HEAD_DIM**-0.5)

    # Each set reads other pages, as far as the pool has them.
    steps = [planned(which, rows) for which in range(max(2, limit // (shape.batch * shape.pages)))]
    base = torch.randn(shape.batch, 1, heads, HEAD_DIM, device="cuda")
    noise = torch.randn(len(steps), shape.batch, rows, heads, HEAD_DIM, device="cuda")
    queries = (base + _NOISE * noise).bfloat16().flatten(1, 2)
    launches = [launch(step, q) for step, q in zip(steps, queries, strict=True)]
    got, want = launches[0](), launch(planned(0, 1), queries[0])()
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error <= 5e-3:
        raise ValueError(f"relative error {error:.1e}: expected at most 5e-3")
    pages = steps[0]._reserved(shape.batch).union_counts[: shape.batch].float().mean()
    measured = {"us": round(replay_us([*launches]), 2), "error": error}
    return measured | ({"union_pages": float(pages)} if rows > 1 else {})
