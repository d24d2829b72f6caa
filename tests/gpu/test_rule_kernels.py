"""The kernels for int4 landmarks and layer weights against the torch definition and float64 loops.

As in `test_kernels.py`, they run in Triton's interpreter on a CPU, and compiled on a GPU.
"""

from typing import Any

import pytest
import torch
from contract import layer_budget
from kernel_step import (
    BF16,
    DEVICES,
    FP16,
    INTERPRETED,
    ON_GPU,
    POISON,
    RECENTS,
    SINKS,
    Step,
    budgets_of,
    fixed_budget,
    relative_error,
    rounding_of_a_gpu,  # noqa: F401
)
from pools import Pool, chosen_pairs, make_schedule

from sparrow_sglang.attention_backends.decode_buffers import DecodeShape
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.kernels import landmark
from sparrow_sglang.attention_backends.kernels.page_table import EVERY_PAGE, NO_CAP
from sparrow_sglang.attention_backends.kernels.select import SelectLaunch
from sparrow_sglang.attention_backends.landmarks import (
    Int4Landmarks,
    Landmarks,
    allocate_landmarks,
    kept_pairs,
)
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.selection import SelectionRule, int4_landmark_tokens


def rule_of(pairs: int | None, heads: int, dim: int, page: int = 16, layers: int = 1) -> Any:
    """The int4 rule, with so many rotary pairs chosen for each layer and KV head."""
    return SelectionRule(
        landmark_tokens=int4_landmark_tokens(page),
        landmark_bits=4,
        landmark_pairs=None if pairs is None else chosen_pairs(layers, heads, pairs, dim),
        group_score="best_head",
    )


def products(step: Step, row: int, head: int) -> torch.Tensor:
    """fp64 score of each page of a row, by the definition, [pages]."""
    group = step.q.shape[1] // step.k.shape[1]
    queries = step.q[row].cpu().double().unflatten(0, (-1, group))[head]
    codes, scales, pairs = (tensor.cpu() for tensor in step.landmarks)
    queries = queries[:, [*pairs[head], *(pairs[head] + queries.shape[1] // 2)]]
    kept = Int4Landmarks(codes, scales, pairs).at(
        step.page_table[row, : step.pages[row]].cpu().long()
    )
    values = kept.unpacked().double() * kept.scales.double()[..., None]
    return torch.einsum("gc,nmc->ngm", queries, values[:, head]).flatten(1).amax(1)


def assert_selected(step: Step, page_ids: torch.Tensor, counts: list[int]) -> None:
    """The kernel kept the best pages, except for scores that fp32 cannot tell apart."""
    for row, count in enumerate(counts):
        assert (page_ids[row, :, count:] == POISON).all(), "entries past the count were written"
        pages = step.pages[row]
        logical = {int(page): n for n, page in enumerate(step.page_table[row, :pages])}
        for head in range(step.k.shape[1]):
            got = [logical[page] for page in page_ids[row, head, :count].tolist()]
            assert got == sorted(set(got)), "pages must be distinct and ascending"
            if count == pages:
                continue
            always = {*range(SINKS), *range(pages - RECENTS, pages)}
            assert always <= set(got)
            score = products(step, row, head)
            chosen = [page for page in got if page not in always]
            left = [page for page in range(pages) if page not in set(got)]
            gap = score[left].max() - score[chosen].min() if chosen else torch.tensor(0.0)
            assert gap <= 2**-18 * score[SINKS : pages - RECENTS].abs().max()


CASES = [
    # lengths, heads, head_dim, page_size, dtype, pairs, launch
    ([1, 160, 161, 700], (4, 2), 64, 16, BF16, 24, (1, 8)),
    ([640, 655, 656], (6, 2), 128, 16, FP16, 48, (3, 8)),
    ([900, 330], (10, 2), 128, 32, BF16, None, (2, 4)),
    ([1400, 700], (7, 1), 256, 64, FP16, None, (2, 8)),
    ([800], (16, 1), 64, 16, FP16, 8, (4, 16)),
    ([640, 655], (6, 2), 80, 16, BF16, None, (3, 8)),
    ([900, 330], (5, 1), 96, 32, FP16, 40, (1, 4)),
    ([500], (1, 1), 64, 16, BF16, 16, (2, 8)),
    ([700], (3, 3), 128, 16, BF16, 32, (2, 16)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "heads", "dim", "page", "dtype", "pairs", "launch"), CASES)
def test_selection_is_the_definition(
    device: str,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    page: int,
    dtype: torch.dtype,
    pairs: int | None,
    launch: tuple[int, int],
) -> None:
    rule = rule_of(pairs, heads[1], dim, page)
    step = Step(device, lengths, heads, dim, page, dtype, seed=dim, rule=rule)
    page_ids, counts = step.select(fixed_budget(step, 9), 12, SelectLaunch(*launch))
    assert counts.tolist() == [min(pages, 9) for pages in step.pages]
    assert_selected(step, page_ids, counts.tolist())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page", "dim", "dtype", "pairs"),
    [
        (16, 64, BF16, 24),
        (32, 128, FP16, None),
        (64, 256, BF16, None),
        (16, 80, FP16, 40),
        (16, 96, BF16, 16),
    ],
)
def test_landmarks_of_a_prefill_and_of_the_page_just_filled(
    device: str, page: int, dim: int, dtype: torch.dtype, pairs: int | None
) -> None:
    lengths = [1, page, 3 * page - 1, 12 * page]
    rule = rule_of(pairs, 2, dim, page)
    step = Step(device, lengths, (4, 2), dim, page, dtype, rule=rule)
    expected = step.landmarks
    codes, scales, kept = expected
    stale = Int4Landmarks(torch.full_like(codes, 99), torch.full_like(scales, 9.0), kept)
    bulk, step.landmarks = stale, Int4Landmarks(*(tensor.clone() for tensor in stale))
    nothing = torch.zeros_like(step.seq_lens)
    arguments = {"page_size": page, "max_pages": max(step.pages)}
    landmark.update_landmarks_bulk(
        step.k, bulk, step.page_table, step.seq_lens, nothing, **arguments
    )
    step.select(fixed_budget(step, 12), 12, SelectLaunch(2, 8), update_landmark=True)
    full = [table[: n // page] for table, n in zip(step.page_table, lengths, strict=True)]
    last = [table[-1:] for table, n in zip(full, lengths, strict=True) if n and n % page == 0]
    for written, pages in ((bulk, torch.cat(full)), (step.landmarks, torch.cat(last))):
        index = pages.long()
        # The means are fp32 sums in different orders, so a value at a rounding edge may differ.
        half_ulp = (written.scales[index] / expected.scales[index] - 1).abs().max()
        assert half_ulp <= 2**-10
        assert (written.codes[index] == expected.codes[index]).float().mean() > 0.99
        got, want = (
            Int4Landmarks(codes[index], scales[index], kept).values()
            for codes, scales, _ in (written, expected)
        )
        assert ((got - want).abs() <= 1.01 * expected.scales[index].float()[..., None]).all()
        others = torch.ones(len(expected.codes), dtype=torch.bool, device=device)
        others[index] = False
        assert (written.codes[others] == 99).all() and (written.scales[others] == 9.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_quantising_is_exact_where_the_mean_is(device: str) -> None:
    """Halves round to even, an all-zero landmark has scale 0, non-finite landmarks code as 0."""
    rule = rule_of(None, 1, 64)
    step = Step(device, [16 * 8], (1, 1), 64, 16, FP16, rule=rule)
    table = step.page_table[0, :8].long()
    keys = step.k.view(-1, 16, 64)
    line = torch.zeros(8, 64, device=device)
    line[0, :6] = torch.tensor([7.0, 0.5, 1.5, 2.5, -2.5, -3.5])
    line[2, 0] = 6.0e4
    line[3, :2] = torch.tensor([torch.inf, 1.0])
    line[4, :2] = torch.tensor([torch.nan, 1.0])
    line[5, :2] = torch.tensor([2.0**-24, -(2.0**-24)])
    keys[table] = line[:, None].expand(-1, 16, -1).half()
    codes, scales, pairs = step.landmarks
    written = Int4Landmarks(torch.full_like(codes, 3), torch.full_like(scales, 3), pairs)
    nothing = torch.zeros_like(step.seq_lens)
    arguments = {"page_size": 16, "max_pages": 8}
    landmark.update_landmarks_bulk(
        step.k, written, step.page_table, step.seq_lens, nothing, **arguments
    )
    means = line.cpu().view(8, 1, 1, 64).expand(-1, -1, 4, -1)
    expected = Int4Landmarks.of(means, pairs.cpu())
    scales = written.scales[table].cpu()
    assert torch.equal(scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
    codes = Int4Landmarks(written.codes[table].cpu(), scales, pairs).unpacked()[:, 0, 0]
    assert codes[0, :6].tolist() == [7, 0, 2, 2, -2, -4]
    assert codes[2, 0] == 7 and not codes[[1, 3, 4]].any()
    assert torch.equal(codes[:5], expected.unpacked()[:5, 0, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("budget", "kinds"), [(3, 1), (9, 1), (4, 2), (19, 5)])
def test_ties_go_to_the_lower_page(device: str, budget: int, kinds: int) -> None:
    step = Step(device, [20 * 16, 19 * 16 + 1], seed=kinds, rule=rule_of(24, 2, 64))
    generator = torch.Generator().manual_seed(budget)
    choice = torch.randint(kinds, (len(step.landmarks.codes),), generator=generator)
    palette = step.page_table[0, :kinds].long()[choice.to(device)]
    codes, scales, pairs = step.landmarks
    step.landmarks = Int4Landmarks(codes[palette], scales[palette], pairs)
    page_ids, _ = step.select(fixed_budget(step, budget), 20, SelectLaunch(2, 8))
    for row in range(2):
        logical = {int(page): n for n, page in enumerate(step.page_table[row, : step.pages[row]])}
        for head in range(2):
            score = products(step, row, head)
            middle = range(SINKS, step.pages[row] - RECENTS)
            best = sorted(middle, key=lambda page: (-round(float(score[page]), 4), page))
            want = sorted([*range(SINKS), *best[: budget - 3]])
            got = [logical[page] for page in page_ids[row, head, : budget - RECENTS].tolist()]
            assert got == want


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_are_not_finite_rank_last(device: str) -> None:
    """A scale of infinity or NaN; a head whose query is NaN does not count."""
    step = Step(device, [50 * 16 + 1], (2, 1), rule=rule_of(None, 1, 64))
    table = step.page_table[0].long()
    codes, scales, _ = step.landmarks
    codes[table] = 0x99
    step.q[:] = 1.0
    step.q[0, 1, 5] = torch.nan
    value = torch.arange(1, 52, device=device, dtype=torch.float32)
    value[3], value[5], value[40] = torch.nan, torch.inf, torch.nan
    scales[table[:51], 0] = value.half()[:, None]
    for budget, left_out in ((49, {5, 40}), (48, {3, 5, 40}), (47, {1, 3, 5, 40})):
        page_ids, _ = step.select(fixed_budget(step, budget), budget, SelectLaunch(1, 16))
        kept = [n for n in range(51) if n not in left_out]
        assert page_ids[0, 0].tolist() == table[kept].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_channel_beside_a_large_one_counts(device: str) -> None:
    """Pages that differ only in a channel whose query is 2^-20 of the largest one."""
    step = Step(device, [40 * 16], (1, 1), rule=rule_of(None, 1, 64))
    table = step.page_table[0, :40].long()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    step.q.zero_()
    step.q[0, 0, 0], step.q[0, 0, 1] = 1.0, 2.0**-20
    codes, scales, _ = step.landmarks
    codes[table], scales[table] = 0x88, 1.0
    codes[table, 0, :, 1] = (0x80 + 1 + order % 15).to(torch.uint8).to(device)[:, None]
    page_ids, _ = step.select(fixed_budget(step, 12), 12, SelectLaunch(2, 16))
    middle = sorted(range(1, 38), key=lambda page: (-int(order[page] % 15), page))[:9]
    assert page_ids[0, 0].tolist() == table[[0, *sorted(middle), 38, 39]].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_each_layer_reads_its_share(device: str) -> None:
    """Layer weights, a cap, a row that keeps all pages, and a padding row."""
    lengths = [900, 640, 1000, 1]
    step = Step(device, lengths, seed=9)
    weights = (1.0, 0.0, 1.7, 0.115384616)
    budgets = budgets_of(step, [8, 12, 13], 20, [NO_CAP, 11, EVERY_PAGE, NO_CAP], weights)
    counts = step.snapshot(budgets)
    for layer, weight in enumerate(weights):
        want = [
            min(pages, layer_budget(most, weight, SINKS + RECENTS))
            for pages, most in zip(step.pages, [13, 11, 10**6, 8], strict=True)
        ]
        want[2] = step.pages[2]
        assert counts[layer].tolist() == want


def landmarks_of_layers(k: torch.Tensor, rule: SelectionRule) -> list[Landmarks]:
    """Landmarks, all 0, of two layers over the pool `k` with pages of 16."""
    _, heads, dim = k.shape
    pairs = [kept_pairs(rule, layer, range(heads), dim, k.device) for layer in (0, 1)]
    return [
        allocate_landmarks(len(k) // 16, 16, heads, dim, kept, k.dtype, k.device) for kept in pairs
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_the_whole_step_is_that_of_the_torch_path(device: str) -> None:
    """Prefill, then a decode step of each layer: in one slice, in two, and by the definition."""
    rule = rule_of(16, 2, 64, layers=2).model_copy(update={"layer_weights": (0.5, 1.5)})
    schedule = make_schedule(16, 10, [6, 8]).model_copy(
        update={"selection": rule, "dense_layers": (), "sink_pages": 2, "recent_pages": 1}
    )
    lengths = [1, 255, 256]
    host = Pool(lengths, (4, 2), 64, 16, seed=3)
    k, v, q = (tensor.to(device, FP16) for tensor in (host.k, host.v, host.q))
    table, rows, seq_lens = (t.to(device) for t in (host.req_to_token, host.rows, host.lengths))
    budgets = BudgetTable(schedule, 2, len(table), device)
    shape = DecodeShape.of(schedule, 4, 2, 64, 256)
    outputs = []
    for reserved in (3, 2, None):
        torch_step = TorchPagedDecode(budgets, table)
        step = torch_step if reserved is None else TritonPagedDecode(budgets, table, shape)
        landmarks = landmarks_of_layers(k, rule)
        before = (seq_lens - 1).clamp_min(1)
        step.plan_extend(rows, before, before.cpu())
        for of_layer in landmarks:
            step.update_landmarks(k, of_layer)
        step.reserve(reserved or 1)
        step.plan_decode(rows, seq_lens, host.lengths)
        outputs.append(
            [step.decode(q, k, v, landmarks[layer], layer, 64**-0.5) for layer in (0, 1)]
        )
        outputs[-1].append(step.decode(q, k, v, None, 1, 64**-0.5))
    for layer in (0, 1, 2):
        assert relative_error(outputs[0][layer], outputs[2][layer]) <= 2e-3
        assert relative_error(outputs[1][layer], outputs[2][layer]) <= 2e-3
    assert not torch.equal(outputs[0][0], outputs[0][1])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no CUDA graphs")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_graph_replay_equals_the_eager_step(device: str) -> None:
    """A captured step follows lengths, landmarks and layer weights that change between replays."""
    rule = rule_of(16, 2, 64, layers=2).model_copy(update={"layer_weights": (0.5, 1.5)})
    schedule = make_schedule(16, 40, [16, 24]).model_copy(
        update={"selection": rule, "dense_layers": ()}
    )
    host = Pool([700, 333, 640, 16], (4, 2), 64, 16, seed=3)
    k, v, q = (tensor.to(device, BF16) for tensor in (host.k, host.v, host.q))
    table, rows, seq_lens = (t.to(device) for t in (host.req_to_token, host.rows, host.lengths))
    budgets = BudgetTable(schedule, 2, len(table), device)
    step = TritonPagedDecode(budgets, table, DecodeShape.of(schedule, 4, 2, 64, 1024))
    landmarks = landmarks_of_layers(k, rule)
    step.reserve(4)
    step.plan_extend(rows, seq_lens, host.lengths)
    for of_layer in landmarks:
        step.update_landmarks(k, of_layer)

    def plan() -> None:
        step.plan_decode(rows, seq_lens, seq_lens.cpu(), captured=True)

    def run() -> list[torch.Tensor]:
        return [step.decode(q, k, v, landmarks[layer], layer, 64**-0.5) for layer in (0, 1)]

    plan()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for shorter in (0, 17, 160):
        seq_lens.copy_((host.lengths - shorter).clamp_min(1))
        plan()
        graph.replay()
        replayed = [out.clone() for out in captured]
        for got, want in zip(replayed, run(), strict=True):
            assert torch.equal(got, want)
