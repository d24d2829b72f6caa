"""The KV usage that a request reports, against a loop over its steps by the contract's budgets."""

from types import SimpleNamespace

import pytest
from contract import step_budget, tokens_read

from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.state import SchedulerState
from sparrow_sglang.schedules.options import KvUsage, RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

GROWING = BudgetSchedule(name="grows", page_size=16, bin_tokens=64, budget_tokens=(64, 80, 112))
OTHER = BudgetSchedule(name="other", page_size=16, bin_tokens=32, budget_tokens=(48, 96))


@pytest.mark.parametrize(
    ("schedule", "cap"),
    [(GROWING, None), (OTHER, None), (GROWING, 64), (GROWING, 4096), (GROWING.as_dense(), 64)],
)
def test_means_and_last_step(schedule, cap):
    for prompt, generated in [(1, 400), (63, 2), (64, 30), (500, 90)]:
        lengths = range(prompt + 1, prompt + generated)
        read = [tokens_read(schedule, length, cap) for length in lengths]
        usage = RequestOption(schedule, cap).usage(prompt, generated)
        assert usage == KvUsage(
            schedule=schedule.name,
            kv_budget_tokens=cap,
            decode_steps=generated - 1,
            kv_tokens_cached_mean=round(sum(lengths) / len(lengths), 1),
            kv_tokens_read_mean=round(sum(read) / len(read), 1),
            kv_tokens_cached_last=lengths[-1],
            kv_tokens_read_last=read[-1],
            kv_budget_last=16 * step_budget(schedule, lengths[-1], cap),
        )


def test_a_retraction_replaces_a_step_by_a_prefill():
    """As one of a server did: 63 tokens of prompt, 120 of response, retracted at 99."""
    usage = RequestOption(GROWING).usage(63, 120, [99])
    cached = [63 + number for number in range(1, 120) if number != 99]
    read = [tokens_read(GROWING, length) for length in cached]
    assert (usage.decode_steps, usage.kv_tokens_cached_mean) == (118, 122.7)
    assert usage.kv_tokens_read_mean == round(sum(read) / 118, 1)


@pytest.mark.parametrize("schedule", [None, GROWING.as_dense()])
def test_dense_reads_what_it_holds(schedule: BudgetSchedule | None):
    usage = RequestOption(schedule).usage(900, 101)
    assert usage.schedule == (None if schedule is None else "dense")
    assert usage.kv_budget_last is None
    assert usage.kv_tokens_read_mean == usage.kv_tokens_cached_mean == 950.5
    assert usage.kv_tokens_read_last == usage.kv_tokens_cached_last == 1000


@pytest.mark.parametrize("generated", [0, 1])
def test_without_a_decode_step(generated):
    assert RequestOption(GROWING).usage(90, generated) == KvUsage("grows", None, 0)


def test_a_scheduler_ignores_an_invalid_option():
    class Req:
        sampling_params = SimpleNamespace(custom_params={"sparrow": {"schedule": "gone"}})

    state = SchedulerState(SimpleNamespace(schedule=GROWING), mode=Mode())
    assert state.option(Req()) == RequestOption(GROWING)
