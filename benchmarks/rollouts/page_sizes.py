"""Other page sizes at the same cost as a reference budget with pages of 16.

In: a reference budget; then the tokens decoded under each schedule. Out: schedules that read as
many bytes, and rows that compare their tails. Pure arithmetic.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparrow_sglang.benchmarks.rollouts.rate_statistics import Bootstrap, Sample, span
from sparrow_sglang.planning.cost_model import equal_cost_budget
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule

_ROUNDINGS = {"down": math.floor, "up": math.ceil}
_VALUE_BYTES = 2


def equal_cost_schedule(
    reference: int, page_size: int, context: int, bin_tokens: int, rounding: str
) -> BudgetSchedule:
    """Budgets that read as many bytes at each bin's middle as `reference` tokens in pages of 16.

    A step reads K and V of its budget, and for every cached page one landmark of the size of one K.
    The result is seldom a whole number of pages, so budgets are rounded: down, to cost at most the
    same, or up.
    """
    toward = _ROUNDINGS[rounding]
    budgets = []
    for index in range(-(-context // bin_tokens)):
        middle = index * bin_tokens + bin_tokens // 2
        equal = equal_cost_budget(reference, PAGE_SIZE, page_size, middle)
        budgets.append(toward(equal / page_size) * page_size)
    return BudgetSchedule(
        name=f"page{page_size}-{rounding}",
        page_size=page_size,
        bin_tokens=bin_tokens,
        budget_tokens=tuple(budgets),
    )


def equal_cost_schedules(
    reference: int, page_sizes: Iterable[int], context: int, bin_tokens: int
) -> dict[int, list[BudgetSchedule]]:
    """Schedules of both roundings, by page size. Raises `ScheduleError` on too small a budget."""
    return {
        page_size: [
            equal_cost_schedule(reference, page_size, context, bin_tokens, rounding)
            for rounding in _ROUNDINGS
        ]
        for page_size in sorted({*page_sizes} - {PAGE_SIZE})
    }


def bytes_read(budget: int, page_size: int, cached: int, head_dim: int) -> int:
    """Bytes that a step reads per KV head of a sparse layer: K and V, and a landmark per page."""
    return _VALUE_BYTES * head_dim * (2 * budget + -(-cached // page_size))


def page_size_rows(
    reference: tuple[BudgetSchedule, Sample],
    others: Sequence[tuple[BudgetSchedule, Sample]],
    bin_tokens: int,
    min_tokens: int,
    head_dim: int,
    draws: Bootstrap,
) -> Iterator[dict[str, Any]]:
    """Tails by bin of each schedule, then how those of `others` differ from the reference's.

    Only bins are used in which every step is sparse under all schedules and each schedule has
    `min_tokens` tokens. `bytes_read` is per KV head of a sparse layer, at the middle of the bin.
    """
    arms = [reference, *others]
    bins = [sample.bins(bin_tokens, schedule.page_size) for schedule, sample in arms]
    shared = [
        index
        for index in sorted(set.intersection(*(set(each) for each in bins)))
        if all(len(each[index]) >= min_tokens for each in bins)
        and all(index * bin_tokens >= _budget(schedule, index, bin_tokens) for schedule, _ in arms)
    ]
    for (schedule, _), samples in zip(arms, bins, strict=True):
        for index in shared:
            middle = index * bin_tokens + bin_tokens // 2
            budget = _budget(schedule, index, bin_tokens)
            yield {
                "kind": "page size",
                "page_size": schedule.page_size,
                "schedule": schedule.name,
                **span(index, bin_tokens),
                "budget_tokens": budget,
                "bytes_read": bytes_read(budget, schedule.page_size, middle, head_dim),
                "tokens": len(samples[index]),
                **draws.tail(samples[index]).fields("tail"),
                **draws.mean(samples[index], samples[index].rates).fields("mean"),
            }
    for (schedule, _), samples in zip(others, bins[1:], strict=True):
        pairs = [(samples[index], bins[0][index]) for index in shared]
        apart = [draws.tail_difference([pair]) for pair in pairs]
        if pairs:
            yield {
                "kind": "difference",
                "page_size": schedule.page_size,
                "schedule": schedule.name,
                "bins": len(shared),
                "bins_lower": sum(each.high is not None and each.high < 0 for each in apart),
                "bins_higher": sum(each.low is not None and each.low > 0 for each in apart),
                **draws.tail_difference(pairs).fields("tail_difference"),
            }


def _budget(schedule: BudgetSchedule, index: int, bin_tokens: int) -> int:
    return schedule.kv_budget_tokens(index * bin_tokens + bin_tokens // 2)
