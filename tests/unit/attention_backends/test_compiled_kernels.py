"""A server compiles few kernels at its first start, however many batch sizes it captures.

Triton takes seconds to compile one, and compiles another for each new set of constant arguments.
"""

from typing import Any

import pytest
import torch

from sparrow_sglang.attention_backends.kernels import decode, select
from sparrow_sglang.attention_backends.kernels.decode_launch import (
    MAX_SPLITS,
    allocate_decode_scratch,
    decode_launch,
)
from sparrow_sglang.attention_backends.kernels.select_launch import (
    allocate_select_scratch,
    select_launch,
)

# The batch sizes that SGLang captures, up to 256.
BATCHES = [1, 2, 4, 8, 12, *range(16, 257, 8)]
DIM, PAGES = 128, 2048
CPU = torch.device("cpu")


class Launches:
    """Stands in for a kernel and keeps the constants of each launch."""

    def __init__(self) -> None:
        self.constants: set[tuple[tuple[str, Any], ...]] = set()

    def __getitem__(self, grid: tuple[int, int]) -> "Launches":
        return self

    def __call__(self, *_: Any, **constants: Any) -> None:
        self.constants.add(tuple(sorted(constants.items())))


@pytest.fixture(params=[4, 8], ids="{} KV heads".format)
def kv_heads(request: pytest.FixtureRequest) -> int:
    heads: int = request.param
    return heads


def test_attention(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    launches = Launches()
    monkeypatch.setattr(decode, "_decode_kernel", launches)
    pool = torch.zeros(16, kv_heads, DIM, dtype=torch.bfloat16)
    for batch in BATCHES:
        q = torch.zeros(batch, 2 * kv_heads, DIM, dtype=torch.bfloat16)
        launch = decode_launch(batch, kv_heads, DIM, 16 * PAGES, CPU, 2)
        parts = allocate_decode_scratch(len(q) * 2 * kv_heads * MAX_SPLITS, 2048, DIM, CPU)
        page_ids = torch.zeros(batch, kv_heads, 1, dtype=torch.int32)
        counts = torch.ones(batch, dtype=torch.int32)
        common = {"page_size": 16, "sm_scale": 1.0, "scratch": parts, "launch": launch}
        decode.sparse_decode(q, pool, pool, page_ids, counts, counts, q, **common)
    assert len(launches.constants) <= 3


def test_selection(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    launches = Launches()
    monkeypatch.setattr(select, "_select_kernel", launches)
    pool = torch.zeros(16, kv_heads, DIM, dtype=torch.bfloat16)
    scratch = allocate_select_scratch(max(BATCHES), kv_heads, PAGES, CPU)
    for batch in BATCHES:
        select.select_pages(
            torch.zeros(batch, 2 * kv_heads, DIM, dtype=torch.bfloat16),
            pool,
            pool[:1],
            torch.zeros(batch, PAGES, dtype=torch.int32),
            torch.ones(batch, dtype=torch.int32),
            torch.ones(batch, dtype=torch.int32),
            torch.zeros(batch, kv_heads, 8, dtype=torch.int32),
            page_size=16,
            sink_pages=1,
            recent_pages=2,
            scratch=scratch,
            launch=select_launch(batch, kv_heads, DIM, PAGES, CPU),
        )
    assert len(launches.constants) <= 2


@pytest.mark.parametrize("kernel", [decode._decode_kernel, select._select_kernel])
def test_what_differs_by_batch_size_is_no_constant(kernel: Any) -> None:
    """If it were specialized, Triton would compile another kernel for 1 and for multiples of 16."""
    assert [each.name for each in kernel.params if each.do_not_specialize] == ["splits"]
