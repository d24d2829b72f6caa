"""Several rows of a request in one launch: the same as plain decode of each row by the definition.

As in `test_kernels.py`, the kernels run in Triton's interpreter on a CPU, and compiled on a GPU.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_step import (
    BF16,
    DEVICES,
    FP8,
    FP16,
    INTERPRETED,
    ON_GPU,
    POISON,
    RECENTS,
    SINKS,
    Step,
    relative_error,
    require_passes_interpreted,
    rounding_of_a_gpu,  # noqa: F401
)
from pools import Pool, chosen_pairs, make_schedule

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.decode_buffers import DecodeShape
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.kernels import decode, select
from sparrow_sglang.attention_backends.kernels.decode import DecodeLaunch, allocate_decode_scratch
from sparrow_sglang.attention_backends.kernels.select import SelectLaunch, allocate_select_scratch
from sparrow_sglang.attention_backends.landmarks import (
    Landmarks,
    MeanLandmarks,
    allocate_landmarks,
    kept_pairs,
)
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.selection import SelectionRule

PUBLISHED = SelectionRule()
INT4 = SelectionRule(landmark_tokens=4, landmark_bits=4, landmark_pairs=24, group_score="best_head")
INT4_MEAN = INT4.model_copy(update={"group_score": "mean_query"})
CHOSEN = INT4.model_copy(
    update={"landmark_pairs": chosen_pairs(2, 2, 16, 64), "layer_weights": (0.6, 1.4)}
)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_the_cases_below_in_tritons_interpreter() -> None:
    require_passes_interpreted(Path(__file__))


def schedule_of(rule: SelectionRule, budgets: list[int], page_size: int = 16) -> BudgetSchedule:
    """Bins of ten pages."""
    plain = make_schedule(page_size, 10, budgets)
    return plain.model_copy(update={"selection": rule, "dense_layers": ()})


class Verification:
    """Rows of requests whose last rows have the `lengths`, and both ways to decode them."""

    def __init__(
        self,
        device: str,
        schedule: BudgetSchedule,
        lengths: list[int],
        rows: int,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        dtype: torch.dtype = FP16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        host = Pool(lengths, heads, head_dim, schedule.page_size, seed=3)
        self.rows, self.rule = rows, schedule.selection
        self.page_size, self.head_dim = schedule.page_size, head_dim
        self.k, self.v = ((x.to(kv_dtype or dtype)).to(device) for x in (host.k, host.v))
        generator = torch.Generator().manual_seed(rows)
        q = torch.randn(len(lengths) * rows, heads[0], head_dim, generator=generator)
        self.q = q.to(device, dtype)
        self.requests = host.rows.to(device)
        self.committed = host.lengths.to(device) - rows
        self.table = host.req_to_token.to(device)
        self.budgets = BudgetTable(LoadedSchedules.of([schedule]), len(self.table), device)
        context = max(lengths) + schedule.page_size
        self.shape = DecodeShape.of(
            schedule, *heads, head_dim, context, (kv_dtype or dtype).itemsize
        )

    def plan(self, step: Any, **options: Any) -> None:
        lengths = self.committed[:, None] + torch.arange(1, self.rows + 1, device=self.q.device)
        self.seq_lens = lengths.flatten()
        requests = self.requests.repeat_interleave(self.rows)
        if isinstance(step, TorchPagedDecode):
            # The definition: rows are a batch like any other.
            step.plan_decode(requests, self.seq_lens, self.seq_lens.cpu())
        else:
            step.plan_decode(requests, self.seq_lens, None, rows_per_request=self.rows, **options)

    def prefilled(self, step: Any) -> list[Landmarks]:
        """Landmarks of two layers, of the pages that are full before the verification."""
        step.plan_extend(self.requests, self.committed, self.committed.cpu())
        layers = []
        for layer in (0, 1):
            heads = range(self.k.shape[1])
            pairs = kept_pairs(self.rule, layer, heads, self.head_dim, self.k.device)
            pages = len(self.k) // self.page_size
            layers.append(allocate_landmarks(pages, self.page_size, self.rule, pairs, self.k.dtype))
            step.update_landmarks(self.k, layers[-1])
        return layers

    def decode(self, step: Any, landmarks: list[Landmarks], **options: Any) -> list[torch.Tensor]:
        scale = self.head_dim**-0.5
        pools = (self.q, self.k, self.v)
        sparse = [
            step.decode(*pools, landmarks[layer], layer, scale, **options) for layer in (0, 1)
        ]
        return [*sparse, step.decode_dense(*pools, scale, **options)]

    def check(self, reserved: int | None = None, **options: Any) -> None:
        """Outputs and landmarks are those of the rows in plain torch."""
        found = []
        for step in (
            TritonPagedDecode(self.budgets, self.table, self.shape),
            TorchPagedDecode(self.budgets, self.table),
        ):
            landmarks = self.prefilled(step)
            step.reserve(reserved or len(self.q))
            self.plan(step)
            found.append((self.decode(step, landmarks, **options), landmarks))
        (outputs, written), (wanted, expected) = found
        for got, want in zip(outputs, wanted, strict=True):
            assert relative_error(got, want) <= (8e-3 if got.dtype == BF16 else 2e-3)
        for ours, theirs in zip(written, expected, strict=True):
            error = (ours.values() - theirs.values()).abs()
            assert (error <= torch.maximum(ours.rounding(), theirs.rounding())).all()


# The last of four rows, with pages of 16: no page begins or ends; the third row, the first and the
# last one fill a page; the second row opens the tenth page, with which a new bin begins; within
# the budget; nothing but the rows and one more token.
LENGTHS = [250, 257, 259, 256, 147, 40, 5]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("rule", [PUBLISHED, CHOSEN], ids=["published", "int4"])
def test_rows_at_page_boundaries(device: str, rule: SelectionRule, rows: int) -> None:
    Verification(device, schedule_of(rule, [6, 8]), LENGTHS, rows).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budgets", [[9, 9], [8, 30]], ids=["the last", "the first"])
def test_some_rows_keep_all_pages(device: str, budgets: list[int]) -> None:
    """In the request of 147 tokens, one that is named does not."""
    Verification(device, schedule_of(INT4, budgets), [147, 146, 160], 4).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rule", "rows", "heads", "head_dim", "page_size", "dtype", "kv_dtype"),
    [
        (INT4_MEAN, 2, (6, 2), 64, 32, BF16, None),
        (PUBLISHED, 4, (6, 2), 80, 16, FP16, None),
        (INT4, 4, (8, 2), 128, 16, BF16, None),
        (INT4, 2, (2, 2), 64, 16, FP16, None),
        (INT4_MEAN, 4, (1, 1), 64, 16, FP16, FP8),
        (PUBLISHED, 2, (8, 1), 256, 64, FP16, None),
        # Ten query heads, and rows that no kernel takes together, run as rows of their own.
        (INT4, 2, (10, 1), 64, 16, FP16, None),
        (PUBLISHED, 3, (4, 2), 64, 16, FP16, None),
    ],
)
def test_heads_and_dtypes(
    device: str,
    rule: SelectionRule,
    rows: int,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    """With sinks, and with scales where the KV cache is FP8."""
    if kv_dtype == FP8 and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    lengths = [20 * page_size + 2, 17 * page_size - 3]
    schedule = schedule_of(rule, [6, 7], page_size)
    step = Verification(device, schedule, lengths, rows, heads, head_dim, dtype, kv_dtype)
    sinks = torch.linspace(-4, 3, heads[0], dtype=dtype, device=device)
    step.check(sinks=sinks, v_scale=1.7 if kv_dtype else 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_slices_hold_whole_requests(device: str) -> None:
    """A batch of four requests in buffers of five rows."""
    Verification(device, schedule_of(PUBLISHED, [6, 8]), LENGTHS[:4], 2).check(reserved=5)


def select_union(
    step: Step, rows: int, keep: list[int], launch: SelectLaunch
) -> tuple[SimpleNamespace, torch.Tensor]:
    """What `select_pages` writes for rows whose last have the step's lengths, and the mask of the
    definition [requests, rows, Hkv, N]."""
    device, heads = step.q.device, step.k.shape[1]
    requests, width = step.page_table.shape
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(requests * rows, *step.q.shape[1:], generator=generator)
    q = q.to(device, step.q.dtype)
    lengths = step.seq_lens[:, None] - torch.arange(rows - 1, -1, -1, device=device)
    lengths = lengths.flatten().int()
    num_pages = -(-lengths // step.page_size)
    counts = torch.minimum(num_pages, torch.tensor(keep, device=device)).int()
    page_ids = torch.full((requests, heads, width), POISON, dtype=torch.int32, device=device)
    sizes = torch.full((requests, heads), POISON, dtype=torch.int32, device=device)
    scratch = allocate_select_scratch(requests * rows, heads, width, device)
    select.select_pages(
        q,
        step.k,
        step.stored(),
        step.page_table,
        lengths,
        counts,
        page_ids,
        page_size=step.page_size,
        sink_pages=SINKS,
        recent_pages=RECENTS,
        scratch=scratch,
        launch=launch,
        update_landmark=False,
        best_head=step.rule.group_score == "best_head",
        rows_per_request=rows,
        union_counts=sizes,
    )
    assert not scratch.arrivals.any(), "arrival counters must be zero for the next launch"
    table = step.page_table.repeat_interleave(rows, 0).long()
    scores = reference.score_pages(q, step.stored(), table, step.rule)
    most = int(counts.max())
    mask = reference.kept_pages(scores, num_pages, counts.long(), most, SINKS, RECENTS)
    chosen = SimpleNamespace(q=q, lengths=lengths, counts=counts, page_ids=page_ids, sizes=sizes)
    return chosen, mask.unflatten(0, (requests, rows))


def assert_union(step: Step, chosen: SimpleNamespace, mask: torch.Tensor) -> None:
    for request, head in torch.cartesian_prod(
        torch.arange(mask.shape[0]), torch.arange(mask.shape[2])
    ).tolist():
        wanted = mask[request, :, head]
        union = wanted.any(0).nonzero().flatten()
        bits = wanted[:, union].int() << torch.arange(len(wanted), device=union.device)[:, None]
        entries = step.page_table[request, union] | bits.sum(0) << 27
        size = int(chosen.sizes[request, head])
        assert chosen.page_ids[request, head, :size].tolist() == entries.tolist()
        assert (chosen.page_ids[request, head, size:] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rule", "lengths", "rows", "keep", "launch"),
    [
        (PUBLISHED, [700, 642], 4, [9, 10, 12, 12, 20, 20, 5, 41], SelectLaunch(3, 8)),
        (INT4, [700, 641], 2, [9, 12, 41, 4], SelectLaunch(2, 8)),
        # More keys than stay in registers.
        (PUBLISHED, [40_000, 33_000], 4, [300, 400, 2400, 700, 3, 4, 5, 6], SelectLaunch(2, 512)),
    ],
    ids=["published", "int4", "long"],
)
def test_the_union_is_that_of_the_definition(
    device: str,
    rule: SelectionRule,
    lengths: list[int],
    rows: int,
    keep: list[int],
    launch: SelectLaunch,
) -> None:
    step = Step(device, lengths, rule=rule, head_dim=64, dtype=FP16)
    assert_union(step, *select_union(step, rows, keep, launch))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [1, 3])
def test_ties_go_to_the_lower_page(device: str, kinds: int) -> None:
    step = Step(device, [40 * 16, 39 * 16 + 1], dtype=FP16)
    palette = step.landmarks[step.page_table[0, :kinds].long()].clone()
    choice = torch.randint(
        kinds, (len(step.landmarks),), generator=torch.Generator().manual_seed(2)
    )
    step.landmarks = palette[choice.to(device)]
    chosen, _ = select_union(step, 4, [3, 4, 9, 30, 12, 12, 12, 39], SelectLaunch(2, 8))
    # Sums, as a matrix product may round equal rows differently.
    landmarks = step.landmarks[step.page_table.long()].transpose(1, 2).double()
    landmarks = landmarks.repeat_interleave(4, 0)
    queries = chosen.q.double().unflatten(1, (landmarks.shape[1], -1)).mean(2, keepdim=True)
    scores = (queries * landmarks).sum(-1).float()
    num_pages = -(-chosen.lengths // 16)
    mask = reference.kept_pages(scores, num_pages, chosen.counts.long(), 39, SINKS, RECENTS)
    assert_union(step, chosen, mask.unflatten(0, (2, 4)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("splits", "rows", "heads", "dtype"),
    [(1, 2, (4, 2), BF16), (3, 4, (4, 2), FP16), (17, 2, (6, 2), FP16), (64, 4, (4, 1), BF16)],
)
def test_splits_of_the_union(
    device: str, splits: int, rows: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Each row attends to its own pages; some programs hold none of a row."""
    step = Step(device, [1200, 401, 18], heads, 64, dtype=dtype)
    chosen, mask = select_union(step, rows, [40, 4, 9, 12][:rows] * 3, SelectLaunch(1, 16))
    parts = len(chosen.q) * heads[0] * splits
    scratch = allocate_decode_scratch(parts, 3 * heads[1], 64, step.q.device)
    scratch.partial_out.fill_(torch.nan)
    scratch.partial_lse.fill_(torch.nan)
    out = torch.full_like(chosen.q, torch.nan)
    decode.sparse_decode(
        chosen.q,
        step.k,
        step.v,
        chosen.page_ids,
        chosen.sizes,
        chosen.lengths,
        out,
        page_size=16,
        sm_scale=0.125,
        scratch=scratch,
        launch=DecodeLaunch(splits, 16),
        rows_per_request=rows,
    )
    assert not scratch.arrivals.any(), "arrival counters must be zero for the next launch"
    k, v = (pool.float().nan_to_num() for pool in (step.k, step.v))
    for row, (length, keep) in enumerate(zip(chosen.lengths, chosen.counts, strict=True)):
        request = row // rows
        logical = torch.stack([x.nonzero().flatten() for x in mask[request, row % rows]])
        want = reference.sparse_decode(
            chosen.q[row : row + 1].float(),
            k,
            v,
            step.page_table[request].long()[logical][None],
            keep[None].long(),
            length[None].long(),
            16,
            0.125,
        )
        assert relative_error(out[row], want[0]) <= (8e-3 if dtype == BF16 else 2e-3)


def test_rows_that_would_score_a_page_which_another_row_fills_are_refused() -> None:
    step = Step("cpu", [100])
    nothing = torch.zeros(1, 2, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows_per_request=2 with recent_pages=1: expected at mos"):
        select.select_pages(
            torch.cat([step.q, step.q]),
            step.k,
            MeanLandmarks(step.landmarks[:, :, None]),
            step.page_table,
            torch.tensor([99, 100]),
            torch.tensor([4, 4], dtype=torch.int32),
            nothing,
            page_size=16,
            sink_pages=1,
            recent_pages=1,
            scratch=allocate_select_scratch(2, 2, 16, step.q.device),
            launch=SelectLaunch(1, 16),
            rows_per_request=2,
            union_counts=nothing[..., 0].contiguous(),
        )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no CUDA graphs")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("rule", [PUBLISHED, INT4], ids=["published", "int4"])
def test_a_graph_replay_equals_the_eager_step(device: str, rule: SelectionRule) -> None:
    lengths = [700, 334, 642, 16]
    rows = Verification(device, schedule_of(rule, [16, 24]), lengths, 4, dtype=BF16)
    step = TritonPagedDecode(rows.budgets, rows.table, rows.shape)
    landmarks = rows.prefilled(step)
    step.reserve(16)
    rows.plan(step, captured=True)
    kept = rows.seq_lens
    rows.decode(step, landmarks)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rows.decode(step, landmarks)
    committed = rows.committed.clone()
    for shorter in (0, 17, 160):
        rows.committed = (committed - shorter).clamp_min(1)
        rows.plan(step, captured=True)
        eager = rows.decode(step, landmarks)
        kept.copy_(rows.seq_lens)
        graph.replay()
        for got, want in zip(captured, eager, strict=True):
            assert torch.equal(got, want)
