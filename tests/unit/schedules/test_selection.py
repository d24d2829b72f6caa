"""Selection rules in schedules, and the pages that requests read under caps, against a loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import budget_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule, ScheduleError

FIELDS: dict[str, Any] = {
    "name": "mine",
    "page_size": 16,
    "bin_tokens": 64,
    "budget_tokens": [64, 80, 80, 112],
    "dense_layers": [0],
}


def test_a_rule_is_saved_and_read_back(tmp_path: Path) -> None:
    schedule = BudgetSchedule(**FIELDS, selection="int4")
    schedule.save(tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["selection"] == "int4"
    assert BudgetSchedule.from_json(tmp_path / "mine.json") == schedule
    assert BudgetSchedule(**FIELDS).selection == "published"


@pytest.mark.parametrize("selection", [None, 4, "int8", {"landmark_bits": 4}], ids=str)
def test_a_bad_rule_is_refused_in_one_line(tmp_path: Path, selection: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FIELDS | {"selection": selection}))
    with pytest.raises(ScheduleError, match="selection=.*'published' or 'int4'") as caught:
        BudgetSchedule.from_json(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    budgets=st.lists(st.integers(3, 12), min_size=1, max_size=4).map(sorted),
    cap=st.sampled_from([None, 48, 96]),
)
def test_a_request_reads_its_budget_up_to_its_cap(budgets: list[int], cap: int | None) -> None:
    schedule = BudgetSchedule(**FIELDS | {"budget_tokens": [16 * pages for pages in budgets]})
    lengths = range(1, 400)
    read = []
    for length in lengths:
        budget = budget_pages(length, 16, schedule.bin_tokens, list(schedule.budget_tokens))
        budget = budget if cap is None else min(budget, cap // 16)
        read.append(length - 16 * max(0, -(-length // 16) - budget))
    assert schedule.tokens_read(lengths, cap).tolist() == read
    first = next(n for n, tokens in zip(lengths, read, strict=True) if tokens < n)
    assert RequestOption(schedule, cap).first_sparse_length() == first


def test_the_device_counts_pages_as_the_schedule_does_for_every_cap() -> None:
    first = BudgetSchedule(**FIELDS)
    dense_below = BudgetSchedule(**FIELDS | {"name": "below", "dense_tokens": 160})
    budgets = BudgetTable(first, 4, "cpu")
    pages = torch.arange(1, 60, dtype=torch.int32)
    for schedule in (first, dense_below, first.as_fixed(96), first.as_dense()):
        schedule.require_switch_from(first)
        budgets.load(schedule)
        options = [(schedule, None), (schedule, 80), (None, None), (schedule, 48)]
        budgets.set_options(range(4), [RequestOption(*each) for each in options])
        for row, (asked, cap) in enumerate(options):
            counted = budgets.num_selected(pages, torch.full_like(pages, row))
            expected = pages if asked is None else schedule.pages_read(pages.numpy(), cap)
            assert counted.dtype == pages.dtype
            assert counted.tolist() == expected.tolist()
