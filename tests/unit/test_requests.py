"""What a request is told it read, against a loop over its steps by the contract's own budgets."""

from types import SimpleNamespace

import pytest
from contract import budget_pages

from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.plugin.state import SchedulerState
from sparrow_sglang.request_options import KvUsage, RequestOption
from sparrow_sglang.schedule import BudgetSchedule

GROWING = BudgetSchedule(name="grows", page_size=16, bin_tokens=64, budget_tokens=(64, 80, 112))
OTHER = BudgetSchedule(name="other", page_size=16, bin_tokens=32, budget_tokens=(48, 96))


def steps_read(schedule: BudgetSchedule, cap: int | None, lengths: range) -> list[int]:
    """KV tokens read at each length: all but the pages left out, which are whole."""
    read = []
    for length in lengths:
        pages = -(-length // 16)
        budget = budget_pages(length, 16, schedule.bin_tokens, schedule.budget_tokens)
        kept = min(pages, budget if cap is None else min(budget, cap // 16))
        read.append(length - 16 * (pages - kept))
    return read


@pytest.mark.parametrize(
    ("schedule", "cap"),
    [
        (GROWING, None),
        (OTHER, None),
        (GROWING, 64),
        (GROWING, 4096),
    ],
)
def test_means_and_last_step(schedule, cap):
    for prompt, generated in [(1, 400), (63, 2), (64, 30), (500, 90)]:
        lengths = range(prompt + 1, prompt + generated)
        read = steps_read(schedule, cap, lengths)
        assert RequestOption(schedule, cap).usage(prompt, generated) == KvUsage(
            schedule=schedule.name,
            kv_budget_tokens=cap,
            decode_steps=generated - 1,
            kv_tokens_cached_mean=pytest.approx(sum(lengths) / len(lengths)),
            kv_tokens_read_mean=pytest.approx(sum(read) / len(read)),
            kv_tokens_cached_last=lengths[-1],
            kv_tokens_read_last=read[-1],
        )


def test_dense_reads_what_it_holds():
    usage = RequestOption(None).usage(900, 101)
    assert usage.schedule is None
    assert usage.kv_tokens_read_mean == usage.kv_tokens_cached_mean == 950.5
    assert usage.kv_tokens_read_last == usage.kv_tokens_cached_last == 1000


@pytest.mark.parametrize("generated", [0, 1])
def test_without_a_decode_step(generated):
    assert RequestOption(GROWING).usage(90, generated) == KvUsage("grows", None, 0)


def test_a_scheduler_reads_an_option_once_and_forgets_it_with_its_request(monkeypatch):
    class Req:
        sampling_params = SimpleNamespace(custom_params={"sparrow": {"schedule": "other"}})

    loaded = LoadedSchedules.of([GROWING, OTHER])
    state = SchedulerState(SimpleNamespace(loaded=loaded))
    request = Req()
    assert state.option(request) == RequestOption(OTHER)
    monkeypatch.setattr(RequestOption, "read", None)
    assert state.option(request) == RequestOption(OTHER)
    del request
    assert len(state._options) == 0


def test_a_scheduler_goes_on_where_an_option_cannot_be_read():
    class Req:
        sampling_params = SimpleNamespace(custom_params={"sparrow": {"schedule": "gone"}})

    state = SchedulerState(SimpleNamespace(loaded=LoadedSchedules.of([GROWING])))
    assert state.option(Req()) == RequestOption(GROWING)
