"""The arithmetic of `make demo`."""

import pytest
from demo_module import demo
from hypothesis import given
from hypothesis import strategies as st

from sparrow_sglang.schedule import BudgetSchedule


@given(
    prompt=st.integers(1, 300),
    generated=st.integers(2, 40),
    layers=st.integers(1, 5),
    budget_pages=st.integers(3, 12),
)
def test_kv_traffic_counts_tokens_page_by_page(
    prompt: int, generated: int, layers: int, budget_pages: int
) -> None:
    schedule = BudgetSchedule.fixed(budget_pages * 16)
    held = read = 0
    for seq_len in range(prompt + 1, prompt + generated):
        pages = [min(16, seq_len - start) for start in range(0, seq_len, 16)]
        for layer in range(layers):
            held += seq_len
            dense = layer in schedule.dense_layers or len(pages) <= budget_pages
            # All kept pages are full but the last, whichever of the others they are.
            read += seq_len if dense else sum(pages[1:budget_pages]) + pages[-1]
    steps = (generated - 1) * layers
    got = demo.kv_traffic(schedule, prompt, generated, layers)
    assert got.cached == pytest.approx(held / steps)
    assert got.read == pytest.approx(read / steps)
