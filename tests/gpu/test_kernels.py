"""The Triton kernels against the torch definition, and against the float64 loop of `contract.py`.
On a CPU they run in Triton's interpreter, see `test_interpreted.py`; on a GPU the same cases run
compiled."""

from typing import Any

import pytest
import torch
from kernel_step import (
    BF16,
    DEVICES,
    FP8,
    FP16,
    INTERPRETED,
    RECENTS,
    SINKS,
    Step,
    assert_selected,
    relative_error,
    rounding_of_a_gpu,  # noqa: F401
)
from step_cases import StepCase, rounding

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.gpu_decode import DecodeShape, TritonPagedDecode
from sparrow_sglang.attention_backends.kernel_limits import HEAD_DIMS
from sparrow_sglang.attention_backends.kernels import landmark, select
from sparrow_sglang.attention_backends.kernels.decode import DecodeLaunch
from sparrow_sglang.attention_backends.kernels.select import SelectLaunch, allocate_select_scratch
from sparrow_sglang.attention_backends.landmarks import Int4Landmarks, Landmarks, MeanLandmarks

DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8)]
CASES = range(24 if INTERPRETED else 100)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", CASES)
def test_a_step_equals_the_contract(device: str, seed: int) -> None:
    """In one slice or in several, as the buffers have fewer rows than the batch."""
    case = StepCase.draw(seed, list(HEAD_DIMS), DTYPES).on(device).poison()
    longest = int(case.pool.lengths.max()) + 64
    shape = DecodeShape(case.schedule, *case.heads, case.head_dim, longest, case.kv_dtype.itemsize)
    step = TritonPagedDecode(case.budgets, case.pool.req_to_token, shape)
    step.reserve(1 + seed % 4)
    for layer, out in enumerate(case.run(step)):
        for row in range(len(out)):
            want = torch.from_numpy(case.expected(layer, row))
            error = relative_error(out[row].cpu(), want)
            assert error <= (5e-3 if case.dtype == BF16 else 1e-3), (layer, row)


def filled(landmarks: Landmarks, value: int) -> Landmarks:
    if isinstance(landmarks, Int4Landmarks):
        return Int4Landmarks(*(torch.full_like(tensor, value) for tensor in landmarks))
    return MeanLandmarks(torch.full_like(landmarks.means, value))


def prefill(step: Step, landmarks: Landmarks) -> None:
    landmark.update_landmarks(
        landmark.address_table({0: step.k}, {0: landmarks}),
        step.k,
        landmarks,
        step.page_table,
        step.seq_lens,
        page_size=step.page_size,
        before=max(step.lengths),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim", "dtype", "int4"),
    [
        (16, 3, 80, BF16, False),
        (32, 2, 128, FP16, False),
        (64, 1, 256, BF16, False),
        (16, 2, 64, BF16, True),
        (32, 2, 80, BF16, True),
    ],
)
@pytest.mark.parametrize(("before", "after"), [(1 << 20, 0), (1, 0), (0, 5), (0, 33)])
def test_landmarks_of_a_dense_pass_in_all_layers(
    device: str,
    page_size: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    int4: bool,
    before: int,
    after: int,
) -> None:
    """Of a prefill, a decode step and two verifications."""
    totals = [1 + after, page_size + after, 3 * page_size - 1, 4 * page_size]
    step = Step(device, totals, (heads, heads), head_dim, page_size, dtype, int4=int4)
    stored = step.stored()
    keys = {3: step.k, 7: step.k + 1}
    written = {layer: filled(stored, 9) for layer in keys}
    cached = [total - after for total in totals]
    landmark.update_landmarks(
        landmark.address_table(keys, written),
        step.k,
        written[3],
        step.page_table,
        step.seq_lens - after,
        page_size=page_size,
        before=min(before, max(cached)),
        after=after,
    )
    full = [
        table[max(length - before, 0) // page_size : total // page_size]
        for table, length, total in zip(step.page_table, cached, totals, strict=True)
    ]
    pages = torch.cat(full).long()
    for layer, k in keys.items():
        expected = filled(stored, 9)
        computed: Any = reference.page_landmarks(
            k.view(-1, page_size, heads, head_dim)[pages], int4
        )
        expected.write(pages, computed)
        # Both means are fp32 sums of the same numbers in different orders, rounded once.
        error = (written[layer].values() - expected.values()).abs()
        assert (error <= 1.01 * rounding(expected)).all()
        assert (error == 0).float().mean() > 0.97


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pages", "splits"), [(2048, 1), (2500, 3), (8192, 2)])
def test_long_rows(device: str, pages: int, splits: int) -> None:
    """Rows with more sort keys than stay in registers, up to 131,072 tokens."""
    step = Step(device, [pages * 16 - 3, 9000], (2, 1), 64, seed=pages)
    page_ids, counts = step.select(700, 700, SelectLaunch(splits, 512))
    assert_selected(step, page_ids, counts, [700, 700])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [4, 9, 39])
@pytest.mark.parametrize("kinds", [1, 5])
def test_ties_go_to_the_lower_page(device: str, budget: int, kinds: int) -> None:
    step = Step(device, [40 * 16, 39 * 16 + 1], seed=kinds)
    palette = step.landmarks[step.page_table[0, :kinds].long()].clone()
    generator = torch.Generator().manual_seed(budget)
    choice = torch.randint(kinds, (len(step.landmarks),), generator=generator)
    step.landmarks = palette[choice.to(device)]
    page_ids, counts = step.select(budget, 40, SelectLaunch(2, 8))
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
        page_ids, _ = step.select(budget, budget, SelectLaunch(2, 16))
        best = sorted(range(1, 118), key=lambda page: (-float(scores[page]), page))[: budget - 3]
        assert page_ids[0, 0].tolist() == table[[0, *sorted(best), 118, 119]].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype", "int4"),
    [
        (64, 128, FP16, False),
        (16, 96, BF16, False),
        (32, 128, FP16, True),
        (64, 256, BF16, True),
        (16, 80, FP16, True),
    ],
)
def test_the_page_just_filled_gets_its_landmark(
    device: str, page_size: int, head_dim: int, dtype: torch.dtype, int4: bool
) -> None:
    lengths = [30 * page_size, 30 * page_size - 1, 2 * page_size, 1]
    step = Step(device, lengths, (4, 2), head_dim, page_size, dtype, int4=int4)
    landmarks = step.stored()
    full = step.page_table[[0, 2], [29, 1]].long()
    expected = landmarks.at(full)
    for tensor in landmarks:
        tensor[full] = 9
    before = [tensor.clone() for tensor in landmarks]
    page_ids, counts = step.select(9, 9, SelectLaunch(3, 8), update_landmark=True)
    # Means are fp32 sums of the same numbers in different orders, rounded once.
    error = (landmarks.at(full).values() - expected.values()).abs()
    assert (error <= 1.01 * rounding(expected)).all()
    assert (error == 0).float().mean() > 0.97
    others = torch.ones(len(before[0]), dtype=torch.bool, device=device)
    others[full] = False
    for now, then in zip(landmarks, before, strict=True):
        torch.testing.assert_close(now[others], then[others], rtol=0, atol=0, equal_nan=True)
    if not int4:
        assert_selected(step, page_ids, counts, [9] * 4)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_and_repeats_change_nothing(device: str) -> None:
    """Padded rows (length 1, page table 0, slot 0) and a second launch on the same scratch."""
    alone = Step(device, [700, 333])
    padded = Step(device, [700, 333])
    padded.lengths, padded.pages = [700, 333, 1, 1], [*alone.pages, 1, 1]
    padded.seq_lens = torch.tensor(padded.lengths, dtype=torch.int32, device=device)
    table = alone.page_table
    padded.page_table = torch.cat([table, torch.zeros_like(table)])
    padded.q = torch.cat([alone.q, torch.randn_like(alone.q)])
    slots = torch.tensor([table[0, 43] * 16 + 11, table[1, 20] * 16 + 12, 0, 0], device=device)
    new = select.NewTokens(alone.k[slots], alone.v[slots], slots)
    padded.k[slots], padded.v[slots] = 0, 0
    scratch = allocate_select_scratch(4, 2, table.shape[1], alone.q.device)
    launch, wide = SelectLaunch(2, 8), DecodeLaunch(3, 32)
    ids, counts = alone.select(9, 9, launch, scratch)
    out = alone.decode(ids, counts, wide)
    for _ in range(2):
        padded_ids, padded_counts = padded.select(9, 9, launch, scratch, new_tokens=new)
        padded_out = padded.decode(padded_ids, padded_counts, wide)
        assert torch.equal(padded_ids[:2], ids) and torch.equal(padded_counts[:2], counts)
        assert torch.equal(padded_out[:2], out)
        assert padded_counts[2:].tolist() == [1, 1]
        assert not padded.k[0].any() and not padded.v[0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_quantising_is_exact_where_the_mean_is(device: str) -> None:
    """Halves round to even, an all-zero landmark has scale 0, non-finite landmarks code as 0."""
    step = Step(device, [16 * 8], (1, 1), 64, 16, FP16, int4=True)
    table = step.page_table[0, :8].long()
    keys = step.k.view(-1, 16, 64)
    line = torch.zeros(8, 64, device=device)
    line[0, :6] = torch.tensor([7.0, 0.5, 1.5, 2.5, -2.5, -3.5])
    line[2, 0] = 6.0e4
    line[3, :2] = torch.tensor([torch.inf, 1.0])
    line[4, :2] = torch.tensor([torch.nan, 1.0])
    line[5, :2] = torch.tensor([2.0**-24, -(2.0**-24)])
    keys[table] = line[:, None].expand(-1, 16, -1).half()
    written = filled(step.landmarks, 3)
    prefill(step, written)
    means = line.cpu().view(8, 1, 1, 64).expand(-1, -1, 4, -1)
    expected = Int4Landmarks.of(means)
    scales = written.scales[table].cpu()
    assert torch.equal(scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
    codes = Int4Landmarks(written.codes[table].cpu(), scales).unpacked()[:, 0, 0]
    assert codes[0, :6].tolist() == [7, 0, 2, 2, -2, -4]
    assert codes[2, 0] == 7 and not codes[[1, 3, 4]].any()
    assert torch.equal(codes[:5], expected.unpacked()[:5, 0, 0])


@pytest.mark.parametrize("device", DEVICES)
def test_int4_scores_that_are_not_finite_rank_last(device: str) -> None:
    """A scale of infinity or NaN; a head whose query is NaN does not count."""
    step = Step(device, [50 * 16 + 1], (2, 1), int4=True)
    table = step.page_table[0].long()
    codes, scales = step.landmarks
    codes[table] = 0x99
    step.q[:] = 1.0
    step.q[0, 1, 5] = torch.nan
    value = torch.arange(1, 52, device=device, dtype=torch.float32)
    value[3], value[5], value[40] = torch.nan, torch.inf, torch.nan
    scales[table[:51], 0] = value.half()[:, None]
    for budget, left_out in ((49, {5, 40}), (48, {3, 5, 40}), (47, {1, 3, 5, 40})):
        page_ids, _ = step.select(budget, budget, SelectLaunch(1, 16))
        kept = [n for n in range(51) if n not in left_out]
        assert page_ids[0, 0].tolist() == table[kept].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_channel_beside_a_large_one_counts(device: str) -> None:
    """Pages that differ only in a channel whose query is 2^-20 of the largest one."""
    step = Step(device, [40 * 16], (1, 1), int4=True)
    table = step.page_table[0, :40].long()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    step.q.zero_()
    step.q[0, 0, 0], step.q[0, 0, 1] = 1.0, 2.0**-20
    codes, scales = step.landmarks
    codes[table], scales[table] = 0x88, 1.0
    codes[table, 0, :, 1] = (0x80 + 1 + order % 15).to(torch.uint8).to(device)[:, None]
    page_ids, _ = step.select(12, 12, SelectLaunch(2, 16))
    middle = sorted(range(1, 38), key=lambda page: (-int(order[page] % 15), page))[:9]
    assert page_ids[0, 0].tolist() == table[[0, *sorted(middle), 38, 39]].tolist()
