"""The Triton kernels against the torch definition, and against the float64 loop of `contract.py`.

On a CPU they run in Triton's interpreter, see `test_interpreted.py`; on a GPU the same cases run
compiled.
"""

import numpy as np
import pytest
import torch
from contract import decode_one
from kernel_step import (
    BF16,
    DEVICES,
    FP16,
    POISON,
    RECENTS,
    SINKS,
    Step,
    assert_selected,
    budgets_of,
    fixed_budget,
    relative_error,
    rounding_of_a_gpu,  # noqa: F401
)
from pools import Pool, make_schedule

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.decode_buffers import DecodeShape
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.kernel_limits import HEAD_DIMS
from sparrow_sglang.attention_backends.kernels import landmark
from sparrow_sglang.attention_backends.kernels.decode import (
    DecodeLaunch,
    decode_launch,
)
from sparrow_sglang.attention_backends.kernels.page_table import (
    EVERY_PAGE,
    NO_CAP,
    snapshot_page_table,
)
from sparrow_sglang.attention_backends.kernels.select import (
    SelectLaunch,
    allocate_select_scratch,
    select_launch,
)
from sparrow_sglang.attention_backends.landmarks import MeanLandmarks
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim", "dtype"),
    [
        (16, 2, 64, BF16),
        (32, 3, 128, FP16),
        (64, 1, 256, BF16),
        (16, 8, 128, FP16),
        (16, 3, 80, BF16),
        (32, 2, 96, FP16),
    ],
)
def test_bulk_landmarks(
    device: str, page_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, page_size, 3 * page_size - 1, 4 * page_size]
    step = Step(device, lengths, (heads, heads), head_dim, page_size, dtype)
    written = torch.full_like(step.landmarks, torch.nan)
    # The last request adds a few tokens to its prefix, as a verification does.
    prefixes = [0, 0, page_size + 3, 3 * page_size + 5]
    prefix_lens = torch.tensor(prefixes, dtype=torch.int32, device=device)
    landmark.update_landmarks_bulk(
        step.k,
        MeanLandmarks(written[:, :, None]),
        step.page_table,
        step.seq_lens,
        prefix_lens,
        page_size=page_size,
        # The grid covers pages behind prefixes only.
        max_pages=2,
    )
    full = [
        table[prefix // page_size : length // page_size]
        for table, prefix, length in zip(step.page_table, prefixes, lengths, strict=True)
    ]
    chosen = torch.cat(full).long()
    # Both means are fp32 sums of the same numbers in different orders, rounded once.
    ulp = 2.0**-7 if dtype == BF16 else 2.0**-10
    torch.testing.assert_close(written[chosen], step.landmarks[chosen], rtol=ulp, atol=1e-6)
    assert (written[chosen] == step.landmarks[chosen]).float().mean() > 0.99
    untouched = torch.ones(len(written), dtype=torch.bool, device=device)
    untouched[chosen] = False
    assert written[untouched].isnan().all(), "a page that is not full was given a landmark"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_snapshot_of_the_page_table(device: str, page_size: int) -> None:
    lengths = [1, 5 * page_size, 300 * page_size - 7]
    step = Step(device, lengths, (1, 1), 64, page_size)
    requests = torch.tensor([4, 0, 2], device=device)
    req_to_token = torch.full((5, 302 * page_size), POISON, dtype=torch.int32, device=device)
    for row, request in enumerate(requests.tolist()):
        slots = step._slots(step.page_table[row].cpu()).int()
        req_to_token[request, : lengths[row]] = slots[: lengths[row]].to(device)
    snapshot = torch.full((4, 301), POISON, dtype=torch.int32, device=device)
    snapshot_page_table(req_to_token, requests, step.seq_lens, snapshot, page_size=page_size)
    for row, pages in enumerate(step.pages):
        assert torch.equal(snapshot[row, :pages], step.page_table[row, :pages])
        assert (snapshot[row, pages:] == POISON).all()
    assert (snapshot[3] == POISON).all(), "a row past the batch was written"


SELECTIONS = [
    # lengths, heads, head_dim, page_size, dtype, launch
    ([1, 160, 161, 700], (4, 2), 64, 16, BF16, SelectLaunch(1, 16)),
    ([640, 655, 656, 657], (6, 2), 128, 16, FP16, SelectLaunch(3, 8)),
    ([3000, 330], (10, 2), 128, 32, BF16, SelectLaunch(4, 16)),
    ([4096, 700, 4097], (7, 1), 256, 64, FP16, SelectLaunch(2, 8)),
    ([1600, 900], (16, 1), 64, 16, FP16, SelectLaunch(32, 8)),
    ([2000], (3, 3), 128, 16, BF16, SelectLaunch(5, 32, num_warps=8)),
    ([640, 655, 1300], (6, 2), 80, 16, BF16, SelectLaunch(3, 16)),
    ([3000, 330], (5, 1), 96, 32, FP16, SelectLaunch(1, 32)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "page_size", "dtype", "launch"), SELECTIONS
)
def test_selection_is_the_definition(
    device: str,
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    launch: SelectLaunch,
) -> None:
    step = Step(device, lengths, heads, head_dim, page_size, dtype, seed=len(lengths))
    # The last of the three bins has no end.
    table = [8, 12, 30]
    page_ids, counts = step.select(budgets_of(step, table, 20), 33, launch)
    assert_selected(step, page_ids, counts, [table[min(pages // 20, 2)] for pages in step.pages])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sink_pages", "recent_pages"), [(0, 1), (3, 4)])
def test_other_pages_that_are_always_kept(device: str, sink_pages: int, recent_pages: int) -> None:
    step = Step(device, [16 * 40, 16 * 40 - 3, 100])
    step.sink_pages, step.recent_pages = sink_pages, recent_pages
    page_ids, counts = step.select(fixed_budget(step, 9), 12, SelectLaunch(2, 8))
    assert_selected(step, page_ids, counts, [9, 9, 9])


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_reads_what_its_request_asked_for(device: str) -> None:
    """A cap below and one above the schedule's budget, and a dense row, in a batch where two
    programs share each row; requests are in another order than rows."""
    lengths = [900, 901, 640, 1000, 1500]
    step = Step(device, lengths, seed=9)
    requests = torch.tensor([6, 0, 3, 5, 1], device=device)
    caps = [4] * 7
    for request, cap in zip(requests.tolist(), [NO_CAP, 30, 5, 11, EVERY_PAGE], strict=True):
        caps[request] = cap
    budgets = budgets_of(step, [8, 12, 13], 20, caps)
    launch = SelectLaunch(2, 8)
    page_ids, counts = step.select(budgets, max(step.pages), launch, requests=requests)
    # All rows hold 40 pages or more, so they are in the last bin.
    expected = [13, 13, 5, 11, step.pages[4]]
    assert_selected(step, page_ids, counts, expected)
    out = step.decode(page_ids, counts, DecodeLaunch(2, 32))
    assert relative_error(out, step.attend(page_ids, counts)) <= 5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pages", "splits"), [(2048, 1), (2500, 3), (8192, 2)])
def test_long_rows(device: str, pages: int, splits: int) -> None:
    """Rows with more sort keys than stay in registers, up to 131,072 tokens."""
    step = Step(device, [pages * 16 - 3, 9000], (2, 1), 64, seed=pages)
    budgets = fixed_budget(step, 700)
    page_ids, counts = step.select(budgets, 700, SelectLaunch(splits, 512))
    assert_selected(step, page_ids, counts, [700, 700])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [3, 4, 9, 39])
@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_ties_go_to_the_lower_page(device: str, budget: int, kinds: int) -> None:
    step = Step(device, [40 * 16, 39 * 16 + 1], seed=kinds)
    palette = step.landmarks[step.page_table[0, :kinds].long()].clone()
    generator = torch.Generator().manual_seed(budget)
    choice = torch.randint(kinds, (len(step.landmarks),), generator=generator)
    step.landmarks = palette[choice.to(device)]
    page_ids, counts = step.select(fixed_budget(step, budget), 40, SelectLaunch(2, 8))
    kept = torch.full((2,), budget, device=device)
    # Equal landmarks give equal scores, so rounding cannot excuse another choice. Scores are sums
    # here, as a matrix product may round equal rows differently.
    landmarks = step.landmarks[step.page_table.long()].transpose(1, 2).double()
    queries = step.q.double().unflatten(1, (landmarks.shape[1], -1)).mean(2, keepdim=True)
    scores = (queries * landmarks).sum(-1)
    num_pages = torch.tensor(step.pages, device=device)
    wanted = reference.select_pages(scores, num_pages, kept, SINKS, RECENTS)
    physical = step.page_table.long()[torch.arange(2, device=device)[:, None, None], wanted]
    assert counts.tolist() == [budget, budget]
    assert torch.equal(page_ids[..., :budget].long(), physical)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", range(4, 40, 7))
def test_scores_one_fp32_step_apart_are_told_apart(device: str, budget: int) -> None:
    step = Step(device, [40 * 16], (1, 1))
    steps = torch.randperm(128, generator=torch.Generator().manual_seed(budget))[:40] // 3
    # score = 1 + steps · 2^-23, exact in fp32: neighbouring keys, some of them twice or thrice.
    step.q.zero_()
    step.q[0, 0, 0], step.q[0, 0, 1] = 1.0, 2.0**-16
    step.landmarks.zero_()
    table = step.page_table[0, :40].long()
    step.landmarks[table, 0, 0] = 1.0
    step.landmarks[table, 0, 1] = (steps / 128).to(BF16).to(device)
    page_ids, _ = step.select(fixed_budget(step, budget), 40, SelectLaunch(1, 16))
    middle = sorted(range(1, 38), key=lambda page: (-int(steps[page]), page))[: budget - 3]
    assert page_ids[0, 0, :budget].tolist() == table[[0, *sorted(middle), 38, 39]].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_are_not_finite_rank_last(device: str) -> None:
    step = Step(device, [50 * 16 + 1], (1, 1))
    table = step.page_table[0].long()
    step.q[:] = 1.0
    value = torch.arange(51, device=device, dtype=torch.float32)
    value[3], value[5], value[40], value[44], value[45] = -torch.inf, torch.inf, torch.nan, 0, -0.0
    step.landmarks[table[:51]] = value[:, None, None].to(BF16)
    # Of 51 pages, 3, 5 and 40 tie for the last place. Just above them are the zeros 44 and 45, of
    # which the later page ranks lower.
    for budget, left_out in ((49, {5, 40}), (48, {3, 5, 40}), (47, {3, 5, 40, 45})):
        page_ids, _ = step.select(fixed_budget(step, budget), budget, SelectLaunch(1, 16))
        kept = [n for n in range(51) if n not in left_out]
        assert page_ids[0, 0].tolist() == table[kept].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "scores",
    [
        2.0 ** torch.arange(-60, 60),
        -(2.0 ** torch.arange(-60, 60)),
        torch.randn(120, generator=torch.Generator().manual_seed(0)) * 1e30,
        torch.ones(120).index_fill(0, torch.tensor([77]), 1e38),
        torch.arange(120.0) + 1e4 * (torch.arange(120) % 7 == 3),
        torch.arange(120.0).sign() * torch.finfo(BF16).max,
    ],
    ids=["geometric", "negative", "squares overflow", "outlier", "two clusters", "largest"],
)
def test_the_threshold_of_scores_that_are_not_normal(device: str, scores: torch.Tensor) -> None:
    """The search for the threshold starts from that of normally distributed scores."""
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    scores = scores[order].to(BF16)
    step = Step(device, [120 * 16], (1, 1))
    table = step.page_table[0, :120].long()
    step.q.zero_()
    step.q[0, 0, 0] = 1.0
    step.landmarks.zero_()
    step.landmarks[table, 0, 0] = scores.to(device)
    for budget in (4, 15, 60, 118):
        page_ids, _ = step.select(fixed_budget(step, budget), budget, SelectLaunch(2, 16))
        best = sorted(range(1, 118), key=lambda page: (-float(scores[page]), page))[: budget - 3]
        assert page_ids[0, 0].tolist() == table[[0, *sorted(best), 118, 119]].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype"),
    [(16, 64, BF16), (64, 128, FP16), (16, 80, FP16), (16, 96, BF16)],
)
def test_the_page_just_filled_gets_its_landmark(
    device: str, page_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [30 * page_size, 30 * page_size - 1, 2 * page_size, 1]
    step = Step(device, lengths, (4, 2), head_dim, page_size, dtype)
    expected = step.landmarks.clone()
    filled = [int(step.page_table[0, 29]), int(step.page_table[2, 1])]
    step.landmarks[filled] = torch.nan
    before = step.landmarks.clone()
    page_ids, counts = step.select(
        fixed_budget(step, 9), 9, SelectLaunch(3, 8), update_landmark=True
    )
    ulp = 2.0**-7 if dtype == BF16 else 2.0**-10
    torch.testing.assert_close(step.landmarks[filled], expected[filled], rtol=ulp, atol=1e-6)
    others = torch.ones(len(expected), dtype=torch.bool, device=device)
    others[filled] = False
    assert torch.equal(step.landmarks[others].nan_to_num(7), before[others].nan_to_num(7))
    assert_selected(step, page_ids, counts, [9] * 4)


DECODES = [
    # lengths, heads, head_dim, page_size, dtype, launch
    ([1, 17, 160, 601], (4, 2), 64, 16, BF16, DecodeLaunch(1, 32)),
    ([300, 999, 16], (6, 2), 128, 16, BF16, DecodeLaunch(3, 64)),
    ([300, 999, 16], (6, 2), 128, 16, FP16, DecodeLaunch(5, 16)),
    ([900, 65], (10, 2), 64, 32, BF16, DecodeLaunch(4, 32, num_warps=2)),
    ([2000, 64], (7, 1), 256, 64, FP16, DecodeLaunch(2, 32)),
    ([777], (16, 1), 128, 16, BF16, DecodeLaunch(8, 16, num_warps=1, stages=4)),
    ([500, 33], (3, 3), 64, 16, FP16, DecodeLaunch(2, 128)),
    ([1, 17, 900], (6, 2), 80, 16, BF16, DecodeLaunch(1, 32)),
    ([300, 999, 16], (6, 2), 80, 16, FP16, DecodeLaunch(3, 32)),
    ([900, 65], (32, 2), 96, 32, BF16, DecodeLaunch(4, 32)),
    ([400], (2, 2), 96, 16, FP16, DecodeLaunch(1, 64)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "heads", "head_dim", "page_size", "dtype", "launch"), DECODES)
def test_attention_is_the_definition_with_and_without_sinks(
    device: str,
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    launch: DecodeLaunch,
) -> None:
    step = Step(device, lengths, heads, head_dim, page_size, dtype, seed=head_dim)
    page_ids, counts = step.select(fixed_budget(step, 21), 24, SelectLaunch(2, 16))
    plain = step.decode(page_ids, counts, launch)
    error = relative_error(plain, step.attend(page_ids, counts))
    assert error <= (5e-3 if dtype == BF16 else 1e-3)
    # The first sink takes nothing of the softmax, the last nearly all; they have the model's dtype.
    sinks = torch.linspace(-30, 12, heads[0], dtype=dtype, device=device)
    out = step.decode(page_ids, counts, launch, sinks)
    expected = step.attend(page_ids, counts, sinks)
    for head in range(heads[0]):
        assert relative_error(out[:, head], expected[:, head]) <= (1e-2 if dtype == BF16 else 2e-3)
    assert torch.equal(out[:, 0], plain[:, 0])
    assert relative_error(out, plain) > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [1, 8, 9, 33, 128])
def test_every_page_is_dense_attention(device: str, splits: int) -> None:
    step = Step(device, [400, 1, 129])
    counts = torch.tensor(step.pages, dtype=torch.int32, device=device)
    page_ids = step.page_table[:, None].expand(-1, 2, -1)
    out = step.decode(page_ids, counts, DecodeLaunch(splits, 32))
    assert relative_error(out, step.attend(page_ids, counts)) <= 5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (32, 64), (16, 80), (16, 96)])
def test_the_whole_step_against_the_contract(device: str, page_size: int, head_dim: int) -> None:
    lengths = [13 * page_size + 5, 20 * page_size, 7]
    step = Step(device, lengths, (6, 2), head_dim, page_size, FP16, seed=page_size)
    page_ids, counts = step.select(
        fixed_budget(step, 8), 8, SelectLaunch(2, 8), update_landmark=True
    )
    out = step.decode(page_ids, counts, DecodeLaunch(2, 32))
    for row, length in enumerate(lengths):
        slots = step._slots(step.page_table[row].cpu())[:length]
        keys, values = (pool.cpu()[slots].double().numpy() for pool in (step.k, step.v))
        want, kept = decode_one(
            step.q[row].cpu().double().numpy(),
            keys,
            values,
            8,
            page_size,
            head_dim**-0.5,
            store=lambda mean: mean.astype(np.float16).astype(np.float64),
        )
        for head, pages in enumerate(kept):
            physical = step.page_table[row].cpu()[pages].tolist()
            assert page_ids[row, head, : len(pages)].tolist() == physical
        assert relative_error(out[row].cpu(), torch.from_numpy(want)) <= 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_padding_and_repeats_change_nothing(device: str) -> None:
    """Padded rows (length 1, page table 0) and a second launch on the same scratch."""
    alone = Step(device, [700, 333])
    padded = Step(device, [700, 333])
    padded.lengths, padded.pages = [700, 333, 1, 1], [*alone.pages, 1, 1]
    padded.seq_lens = torch.tensor(padded.lengths, dtype=torch.int32, device=device)
    padded.page_table = torch.cat([alone.page_table, torch.zeros_like(alone.page_table)])
    padded.q = torch.cat([alone.q, torch.randn_like(alone.q)])
    scratch = allocate_select_scratch(4, 2, alone.page_table.shape[1], alone.q.device)
    launch, wide = SelectLaunch(2, 8), DecodeLaunch(3, 32)
    ids, counts = alone.select(fixed_budget(alone, 9), 9, launch, scratch)
    out = alone.decode(ids, counts, wide)
    for _ in range(2):
        padded_ids, padded_counts = padded.select(fixed_budget(padded, 9), 9, launch, scratch)
        padded_out = padded.decode(padded_ids, padded_counts, wide)
        assert torch.equal(padded_ids[:2], ids) and torch.equal(padded_counts[:2], counts)
        assert torch.equal(padded_out[:2], out)
        assert padded_counts[2:].tolist() == [1, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_launches_that_serving_uses_fit_every_head_dim(device: str, head_dim: int) -> None:
    """Tiles of launches depend on the head dimension, and must be powers of two."""
    step = Step(device, [700, 90], (4, 2), head_dim)
    pick = select_launch(2, 2, head_dim, step.page_table.shape[1], step.q.device)
    many = select_launch(512, 2, head_dim, step.page_table.shape[1], step.q.device)
    attend = decode_launch(2, 2, head_dim, 9 * 16, step.q.device, step.k.itemsize)
    for launch in (pick, many):
        page_ids, counts = step.select(fixed_budget(step, 9), 9, launch)
        assert_selected(step, page_ids, counts, [9, 6])
    out = step.decode(page_ids, counts, attend)
    assert relative_error(out, step.attend(page_ids, counts)) <= 5e-3


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_beside_a_padded_head_is_neither_read_nor_written(device: str) -> None:
    """The neighbour head's keys and values are infinite, and its part of the output is checked."""
    step = Step(device, [640], (4, 2), 80, dtype=FP16)
    page_ids, counts = step.select(fixed_budget(step, 9), 9, SelectLaunch(2, 16))
    alone = step.decode(page_ids, counts, DecodeLaunch(2, 32))
    landmark_of_first = step.landmarks[:, 0].clone()
    for pool in (step.k, step.v, step.landmarks):
        pool[:, 1] = torch.inf
    again, _ = step.select(fixed_budget(step, 9), 9, SelectLaunch(2, 16), update_landmark=True)
    assert torch.equal(again[:, 0], page_ids[:, 0])
    beside = step.decode(page_ids, counts, DecodeLaunch(2, 32))
    assert torch.equal(beside[:, :2], alone[:, :2])
    assert torch.equal(step.landmarks[1:, 0], landmark_of_first[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_beyond_the_buffers_runs_in_slices(device: str) -> None:
    """Landmarks of a prefill, then a decode step: in one slice, in three, and by the definition."""
    head_dim = 80
    schedule = make_schedule(16, 40, [16, 24])
    lengths = [1, 256, 257, 500, 641]
    host = Pool(lengths, (4, 2), head_dim, 16, seed=head_dim)
    k, v, q = (tensor.to(device, FP16) for tensor in (host.k, host.v, host.q))
    table, rows, seq_lens = (t.to(device) for t in (host.req_to_token, host.rows, host.lengths))
    budgets = BudgetTable(schedule, 2, len(table), device)
    shape = DecodeShape.of(schedule, 4, 2, head_dim, 1024)
    steps = [TritonPagedDecode(budgets, table, shape) for _ in range(2)]
    outputs = []
    for step, reserved in zip(
        [*steps, TorchPagedDecode(budgets, table)], [5, 2, None], strict=True
    ):
        landmarks = MeanLandmarks(k.new_full((len(k) // 16, 2, 1, head_dim), torch.nan))
        before = (seq_lens - 1).clamp_min(1)
        step.plan_extend(rows, before, before.cpu())
        step.update_landmarks(k, landmarks)
        if reserved is not None:
            step.reserve(reserved)
        step.plan_decode(rows, seq_lens, host.lengths)
        outputs.append(step.decode(q, k, v, landmarks, 0, head_dim**-0.5))
    assert relative_error(outputs[0], outputs[2]) <= 2e-3
    assert relative_error(outputs[1], outputs[2]) <= 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_launchers_name_what_they_refuse(device: str) -> None:
    step = Step(device, [100], (4, 2))
    budgets = fixed_budget(step, 4)
    step.page_size = 20
    with pytest.raises(ValueError, match=r"page_size=20 .* one of \(16, 32, 64\)"):
        step.select(budgets, 4, SelectLaunch(1, 8))
    step.page_size = 16
    good = step.select(budgets, 4, SelectLaunch(1, 8))
    with pytest.raises(
        ValueError, match=r"num_selected has dtype torch.int64: expected torch.int32"
    ):
        step.decode(good[0], good[1].long(), DecodeLaunch(1))
    with pytest.raises(ValueError, match=r"page_ids has shape \(1, 1, 4\): expected \(1, 2, 'any'"):
        step.decode(good[0][:, :1], good[1], DecodeLaunch(1))
    step.q = torch.cat([step.q] * 9, dim=1)
    with pytest.raises(ValueError, match=r"num_q_heads=36 .* 1 to 16 query heads"):
        step.select(budgets, 4, SelectLaunch(1, 8))
