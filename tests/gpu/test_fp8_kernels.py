"""The kernels on an FP8 KV pool against float64 loops over the dequantised keys and values.

As in `test_kernels.py`, they run in Triton's interpreter on a CPU, and compiled on a GPU.
"""

import numpy as np
import pytest
import torch
from contract import decode_one
from kernel_step import (
    BF16,
    DEVICES,
    FP8,
    FP16,
    ON_GPU,
    Step,
    fixed_budget,
    relative_error,
    rounding_of_a_gpu,  # noqa: F401
)
from pools import Pool, make_schedule

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.decode_buffers import DecodeShape
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.kernels import landmark, select
from sparrow_sglang.attention_backends.kernels.decode import DecodeLaunch
from sparrow_sglang.attention_backends.landmarks import (
    Int4Landmarks,
    MeanLandmarks,
    allocate_landmarks,
    kept_pairs,
)
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.selection import SelectionRule

SCALES = (0.5, 1.7)
INT4 = SelectionRule(landmark_tokens=4, landmark_bits=4, group_score="best_head")


def bf16(mean: np.ndarray) -> np.ndarray:
    return torch.from_numpy(mean).bfloat16().double().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype", "launch", "rule"),
    [
        (16, 64, BF16, DecodeLaunch(1, 32), SelectionRule()),
        (16, 128, BF16, DecodeLaunch(3, 32), SelectionRule()),
        (32, 80, BF16, DecodeLaunch(2, 32), SelectionRule()),
        (64, 256, FP16, DecodeLaunch(2, 16), SelectionRule()),
        (16, 64, FP16, DecodeLaunch(2, 32), INT4),
    ],
    ids=str,
)
def test_the_whole_step_against_the_contract(
    device: str,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    launch: DecodeLaunch,
    rule: SelectionRule,
) -> None:
    lengths = [13 * page_size + 5, 20 * page_size, 7]
    step = Step(
        device, lengths, (6, 2), head_dim, page_size, dtype, 5, rule, kv_dtype=FP8, kv_scales=SCALES
    )
    page_ids, counts = step.select(
        fixed_budget(step, 8), 8, select.SelectLaunch(2, 8), update_landmark=True
    )
    out = step.decode(page_ids, counts, launch)
    for row, length in enumerate(lengths):
        slots = step._slots(step.page_table[row].cpu())[:length]
        keys, values = (
            pool.cpu()[slots].double().numpy() * scale
            for pool, scale in zip((step.k, step.v), SCALES, strict=True)
        )
        want, kept = decode_one(
            step.q[row].cpu().double().numpy(),
            keys,
            values,
            8,
            page_size,
            head_dim**-0.5,
            # The keys' scale is a power of two, so means round the same with it and without it.
            store=bf16,
            rule=rule,
        )
        for head, pages in enumerate(kept):
            physical = step.page_table[row].cpu()[pages].tolist()
            assert page_ids[row, head, : len(pages)].tolist() == physical
        # Softmax weights are rounded to the queries' dtype.
        assert relative_error(out[row].cpu(), torch.from_numpy(want)) <= (
            5e-3 if dtype == BF16 else 1e-3
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [SelectionRule(), INT4], ids=str)
def test_landmarks_of_a_prefill_are_the_definition(device: str, rule: SelectionRule) -> None:
    step = Step(device, [333, 16, 5], (4, 2), 64, dtype=BF16, rule=rule, kv_dtype=FP8)
    expected, nothing_yet = step.landmarks, torch.zeros_like(step.seq_lens)
    written = (
        Int4Landmarks(*(torch.zeros_like(tensor) for tensor in expected[:2]), expected.pairs)
        if isinstance(expected, Int4Landmarks)
        else torch.zeros_like(expected)
    )
    landmark.update_landmarks_bulk(
        step.k,
        written if isinstance(written, Int4Landmarks) else MeanLandmarks(written[:, :, None]),
        step.page_table,
        step.seq_lens,
        nothing_yet,
        page_size=16,
        max_pages=step.page_table.shape[1],
    )
    full = torch.cat([step.page_table[0, :20], step.page_table[1, :1]]).long()
    # Compare codes and scales only; pairs are no landmarks.
    stored = zip(written[:2], expected[:2], strict=True) if rule == INT4 else [(written, expected)]
    for got, want in stored:
        assert torch.equal(got[full], want[full])


@pytest.mark.parametrize("device", DEVICES)
def test_pools_of_other_dtypes_are_refused(device: str) -> None:
    step = Step(device, [40], kv_dtype=FP8)
    page_ids, counts = step.select(fixed_budget(step, 9), 9, select.SelectLaunch(1, 16))
    keys, step.k = step.k, step.k.to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="k_buffer has dtype torch.float8_e5m2"):
        step.decode(page_ids, counts, DecodeLaunch(1))
    step.k, step.v = keys, step.v.to(BF16)
    with pytest.raises(ValueError, match="v_buffer has dtype torch.bfloat16"):
        step.decode(page_ids, counts, DecodeLaunch(1))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("rule", [SelectionRule(), INT4], ids=str)
def test_a_captured_step_follows_lengths_and_the_definition(
    device: str, rule: SelectionRule
) -> None:
    schedule = make_schedule(16, 20, [6, 10]).model_copy(update={"selection": rule})
    host = Pool([700, 333, 640, 16], (4, 2), 64, 16, seed=3)
    k, v = (pool.to(device, BF16).to(FP8) for pool in (host.k, host.v))
    q = host.q.to(device, BF16)
    table, rows, seq_lens = (t.to(device) for t in (host.req_to_token, host.rows, host.lengths))
    budgets = BudgetTable(schedule, 2, len(table), device)
    step = TritonPagedDecode(budgets, table, DecodeShape.of(schedule, 4, 2, 64, 1024, k.itemsize))
    pairs = kept_pairs(rule, 0, range(2), 64, device)
    landmarks = allocate_landmarks(len(k) // 16, 16, 2, 64, pairs, FP8, device)
    step.reserve(4)
    step.plan_extend(rows, seq_lens, host.lengths)
    step.update_landmarks(k, landmarks)

    def plan() -> None:
        step.plan_decode(rows, seq_lens, seq_lens.cpu(), captured=True)

    def run() -> torch.Tensor:
        return step.decode(q, k, v, landmarks, 0, 64**-0.5 * SCALES[0], SCALES[1])

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
        replayed = captured.clone()
        assert torch.equal(replayed, run())
        for row, length in enumerate(seq_lens.tolist()):
            slots = host.slots[row][:length]
            keys, values = (pool.cpu()[slots].double().numpy() for pool in (k, v))
            want, _ = decode_one(
                q[row].cpu().double().numpy(),
                keys * SCALES[0],
                values * SCALES[1],
                schedule.kv_budget_tokens(length) // 16,
                16,
                64**-0.5,
                store=bf16,
                rule=rule,
            )
            assert relative_error(replayed[row].cpu(), torch.from_numpy(want)) <= 5e-3


@pytest.mark.parametrize("device", DEVICES)
def test_dense_attention_reads_every_fp8_page(device: str) -> None:
    step = Step(device, [400, 1, 129], kv_dtype=FP8, kv_scales=SCALES)
    counts = torch.tensor(step.pages, dtype=torch.int32, device=device)
    page_ids = step.page_table[:, None].expand(-1, 2, -1)
    out = step.decode(page_ids, counts, DecodeLaunch(3, 32))
    want = reference.sparse_decode(
        step.q.double(),
        *(
            pool.double().nan_to_num() * scale
            for pool, scale in zip((step.k, step.v), SCALES, strict=True)
        ),
        page_ids.long(),
        counts.long(),
        step.seq_lens.long(),
        16,
        step.q.shape[-1] ** -0.5,
    )
    assert relative_error(out, want) <= 5e-3
