"""A server compiles few kernels, and all of them before its first request. Triton takes seconds to
compile one, and compiles another for each new set of constant arguments and for numbers that are 1
or multiples of 16."""

from collections import Counter

import pytest
import torch
from pools import make_schedule

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.gpu_decode import DecodeShape, TritonPagedDecode
from sparrow_sglang.attention_backends.kernels.decode import _SPLIT_PADS
from sparrow_sglang.attention_backends.kernels.select import NewTokens
from sparrow_sglang.attention_backends.landmarks import allocate_landmarks
from sparrow_sglang.schedules.schedule import INT4, RULES, SelectionRule

# The batch sizes that SGLang captures, up to 256.
BATCHES = [1, 2, 4, 8, 12, *range(16, 257, 8)]
DIM, PAGES = 128, 2048
CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_are_few_and_compiled_before_the_first_request(
    compiled: list[str], kv_heads: int, rule: SelectionRule
) -> None:
    schedule = make_schedule(16, 40, [16, 24]).model_copy(update={"selection": rule})
    pool = torch.zeros(64, kv_heads, DIM, dtype=torch.bfloat16)
    table = torch.zeros(max(BATCHES) + 1, 16 * PAGES, dtype=torch.int32)
    landmarks = allocate_landmarks(4, 16, kv_heads, DIM, pool.dtype, "cpu", rule == INT4)
    budgets = BudgetTable(schedule, len(table), "cpu")
    shape = DecodeShape(schedule, 2 * kv_heads, kv_heads, DIM, 16 * PAGES)
    step = TritonPagedDecode(budgets, table, shape)

    def decode(batch: int) -> None:
        # At any address, as one of several rows.
        lengths = torch.ones(2, batch, dtype=torch.int64)[1]
        step.plan_decode(torch.zeros_like(lengths), lengths, lengths)
        qkv = torch.zeros(batch, 4 * kv_heads, DIM, dtype=torch.bfloat16)
        q, *new = qkv.split([2 * kv_heads, kv_heads, kv_heads], dim=1)
        step.decode(q, pool, pool, None, 1.0)
        step.decode(q, pool, pool, landmarks, 1.0, new_tokens=NewTokens(*new, lengths))

    step.compile_prefill({0: pool}, {0: landmarks})
    step.reserve(max(BATCHES))
    for batch in BATCHES:
        decode(batch)
    at_start = Counter(compiled)
    assert at_start.pop("_snapshot_kernel") == 2
    assert at_start.pop("_decode_kernel") <= 6
    assert at_start.pop("_merge_kernel") <= len(_SPLIT_PADS)
    assert at_start.pop("_select_kernel") <= 2
    assert list(at_start.values()) == [1], at_start

    compiled.clear()
    for tokens in (1, 16, 17, 255, 256, 257, 16 * PAGES):
        for requests in (1, 2, 3, 16, 17):
            lengths = torch.full((requests,), tokens)
            step.plan_extend(torch.zeros_like(lengths), lengths, lengths, tokens)
            step.update_landmarks({0: pool}, {0: landmarks})
    # A batch that no graph holds runs in slices.
    for rest in BATCHES:
        decode(max(BATCHES) + rest)
    assert compiled == []
