"""The Triton step on a real device: no host synchronisation, graphs, padding, agreement."""

import pytest
import torch
from pools import Pool, make_schedule

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.decode_buffers import DecodeShape
from sparrow_sglang.attention_backends.dense_side import PlanGuard
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.landmarks import MeanLandmarks
from sparrow_sglang.attention_backends.metadata import BudgetTable, PageTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, HEADS, DIM, SCALE = 16, (16, 8), 128, 128**-0.5
SCHEDULE = make_schedule(PAGE, 40, [16, 24, 24, 48])
LENGTHS = [1, 255, 256, 257, 639, 640, 641, 1900, 3000, 4096]


class DevicePool:
    """A `Pool` in bf16 on the GPU, with landmarks, which `prefill` fills."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        host = Pool(lengths, HEADS, DIM, PAGE, seed)
        self.k, self.v, self.q = (t.to("cuda", torch.bfloat16) for t in (host.k, host.v, host.q))
        self.req_to_token = host.req_to_token.cuda()
        self.rows, self.lengths = host.rows.cuda(), host.lengths.cuda()
        self.lengths_cpu = host.lengths
        shape = (len(self.k) // PAGE, HEADS[1], 1, DIM)
        self.landmarks = MeanLandmarks(
            torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        )

    def step(self, max_batch: int = 16) -> TritonPagedDecode:
        budgets = BudgetTable(SCHEDULE, 2, len(self.req_to_token), "cuda")
        shape = DecodeShape.of(SCHEDULE, *HEADS, DIM, 8192)
        step = TritonPagedDecode(budgets, self.req_to_token, shape)
        step.reserve(max_batch)
        return step

    def prefill(self, step: TritonPagedDecode) -> None:
        before = (self.lengths - 1).clamp_min(1)
        step.plan_extend(self.rows, before, before.cpu())
        step.update_landmarks(self.k, self.landmarks)

    def decode(self, step: TritonPagedDecode) -> torch.Tensor:
        return step.decode(self.q, self.k, self.v, self.landmarks, 0, SCALE)


@pytest.fixture
def pool() -> DevicePool:
    return DevicePool(LENGTHS)


def test_step_agrees_with_the_reference_in_fp32(pool):
    step = pool.step()
    pool.prefill(step)
    step.plan_decode(pool.rows, pool.lengths, pool.lengths_cpu)
    out = pool.decode(step)
    pages = PageTable.read(pool.req_to_token, pool.rows, pool.lengths, max(LENGTHS), PAGE)
    budgets = BudgetTable(SCHEDULE, 2, len(pool.req_to_token), "cuda")
    num_selected = budgets.num_selected(pages.num_pages, pool.rows)[0]
    scores = reference.score_pages(pool.q, pool.landmarks, pages.physical)
    selected = reference.select_pages(scores, pages.num_pages, num_selected, 1, 2)
    physical = pages.physical[:, None].expand(-1, HEADS[1], -1).gather(-1, selected)
    expected = reference.sparse_decode(
        pool.q.float(),
        pool.k.float(),
        pool.v.float(),
        physical,
        num_selected,
        pool.lengths,
        PAGE,
        SCALE,
    )
    error = (out.float() - expected).norm() / expected.norm()
    assert error <= 5e-3


def test_a_step_never_waits_for_the_device(pool):
    step = pool.step()
    pool.prefill(step)
    step.plan_decode(pool.rows, pool.lengths, pool.lengths_cpu)
    pool.decode(step)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step.plan_decode(pool.rows, pool.lengths, pool.lengths_cpu)
            pool.decode(step)
        with pytest.raises(RuntimeError, match="synchroniz"):
            pool.lengths.max().item()  # the mode really catches a synchronisation
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_steady_state_step_allocates_nothing_but_its_output(pool):
    step = pool.step()
    pool.prefill(step)
    step.plan_decode(pool.rows, pool.lengths, pool.lengths_cpu)
    pool.decode(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.plan_decode(pool.rows, pool.lengths, pool.lengths_cpu)
    out = pool.decode(step)
    assert torch.cuda.max_memory_allocated() - before == out.nbytes


def test_graph_replay_equals_eager_bit_for_bit_at_other_lengths(pool):
    step = pool.step()
    pool.prefill(step)
    lengths, rows = torch.ones_like(pool.lengths), torch.zeros_like(pool.rows)
    step.plan_decode(rows, lengths, lengths.cpu())
    for _ in range(2):
        pool.decode(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pool.decode(step)
    for shift in (0, 1, 17):
        lengths.copy_((pool.lengths - shift).clamp_min(1))
        rows.copy_(pool.rows)
        step.plan_decode(rows, lengths, lengths.cpu())
        captured.fill_(torch.nan)
        graph.replay()
        replayed = captured.clone()
        eager = pool.step()
        eager.plan_decode(pool.rows, lengths, lengths.cpu())
        torch.testing.assert_close(replayed, pool.decode(eager), atol=0, rtol=0)


def test_a_plan_waits_until_the_one_before_has_left_pinned_memory():
    guard, planned = PlanGuard(), torch.zeros(1 << 20, dtype=torch.int32, pin_memory=True)
    copies = []
    for step in (1, 2, 3):
        with guard:
            planned.fill_(step)
            # The device is busy with other work when the plan is made.
            torch.cuda._sleep(100_000_000)
            copies.append(planned.to("cuda", non_blocking=True))
    assert [torch.unique(copy).tolist() for copy in copies] == [[1], [2], [3]]
