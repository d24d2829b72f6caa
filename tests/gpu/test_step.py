"""The Triton step on a real device: no host synchronisation, graphs, padding, agreement."""

import pytest
import torch
from kernel_step import BF16, FP8
from pools import Pool, make_schedule
from step_cases import StepCase

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.dense_side import PlanGuard
from sparrow_sglang.attention_backends.gpu_decode import DecodeShape, TritonPagedDecode
from sparrow_sglang.attention_backends.landmarks import MeanLandmarks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, HEADS, DIM, SCALE = 16, (16, 8), 128, 128**-0.5
SCHEDULE = make_schedule(PAGE, 40, [16, 24, 24, 48])
LENGTHS = [1, 255, 256, 257, 639, 640, 641, 1900, 3000, 4096]


class DevicePool:
    """A `Pool` in bf16 on the GPU, with landmarks, which `prefill` fills."""

    def __init__(self, lengths: list[int]) -> None:
        host = Pool(lengths, HEADS, DIM, PAGE, 0)
        self.k, self.v, self.q = (t.to("cuda", torch.bfloat16) for t in (host.k, host.v, host.q))
        self.req_to_token = host.req_to_token.cuda()
        self.rows, self.lengths = host.rows.cuda(), host.lengths.cuda()
        self.lengths_cpu = host.lengths
        shape = (len(self.k) // PAGE, HEADS[1], 1, DIM)
        self.landmarks = MeanLandmarks(
            torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        )

    def step(self, max_batch: int = 16) -> TritonPagedDecode:
        budgets = BudgetTable(SCHEDULE, len(self.req_to_token), "cuda")
        shape = DecodeShape(SCHEDULE, *HEADS, DIM, 8192)
        step = TritonPagedDecode(budgets, self.req_to_token, shape)
        step.reserve(max_batch)
        return step

    def prefill(self, step: TritonPagedDecode) -> None:
        before = (self.lengths - 1).clamp_min(1)
        step.plan_extend(self.rows, before, before.cpu(), int(before.max()))
        step.update_landmarks({0: self.k}, {0: self.landmarks})

    def decode(self, step: TritonPagedDecode) -> torch.Tensor:
        return step.decode(self.q, self.k, self.v, self.landmarks, SCALE)


@pytest.fixture
def pool() -> DevicePool:
    return DevicePool(LENGTHS)


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


@pytest.mark.parametrize("seed", range(24))
def test_a_graph_replay_equals_the_eager_step(seed: int) -> None:
    """A captured step follows lengths that change between replays."""
    case = StepCase.draw(seed, [64, 80, 128, 256], [(BF16, BF16), (BF16, FP8)]).on("cuda")
    pool, schedule = case.pool, case.schedule
    shape = DecodeShape(schedule, *case.heads, case.head_dim, 4096, case.kv_dtype.itemsize)
    step = TritonPagedDecode(case.budgets, pool.req_to_token, shape)
    step.reserve(len(case.options))
    lengths, whole = pool.lengths.clone(), pool.lengths
    pool.lengths, on_host = lengths, lengths.cpu()

    def plan() -> None:
        step.plan_decode(pool.rows, lengths, on_host, captured=True)

    landmarks = case.prefill(step)
    plan()
    case.decode(step, landmarks)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan()
        captured = case.decode(step, landmarks)
    for shorter in (0, 1, 17, 160):
        lengths.copy_((whole - shorter).clamp_min(1))
        graph.replay()
        replayed = [out.clone() for out in captured]
        plan()
        assert all(map(torch.equal, replayed, case.decode(step, landmarks)))


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
