"""Requests that an audit records, and what is kept of them until they are scored."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from messages import tokenized

from sparrow_sglang.mismatch.exact_rates import AUDIT_SLOTS
from sparrow_sglang.plugin.launcher.audit.auditor import Auditor
from sparrow_sglang.plugin.launcher.audit.queue import AuditQueue, skip_reason
from sparrow_sglang.plugin.launcher.audit.statistics import SKIPPED
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.scheduler.exact_acceptance import keep_or_compare
from sparrow_sglang.plugin.state import PROCESS, SchedulerState
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

ACTIVE = BudgetSchedule.fixed(64)


DENSE = ACTIVE.as_dense()


@pytest.mark.parametrize(
    ("changes", "option", "reason"),
    [
        # Whatever a request samples with, it is audited.
        ({}, RequestOption(ACTIVE), None),
        ({"temperature": 0.01}, RequestOption(ACTIVE), None),
        ({"regex": "a+"}, RequestOption(ACTIVE), None),
        ({"logit_bias": {"5": 1.0}}, RequestOption(ACTIVE), None),
        ({"return_logprob": True, "logprob_start_len": 0}, RequestOption(ACTIVE), None),
        ({"input_ids": None}, RequestOption(ACTIVE), "input"),
        ({"session_params": {}}, RequestOption(ACTIVE), "input"),
        ({"custom_params": [1]}, RequestOption(ACTIVE), "input"),
        ({}, None, "own_schedule"),
        ({}, RequestOption(None), "own_schedule"),
        ({}, RequestOption(ACTIVE, 32), "own_schedule"),
        ({}, RequestOption(BudgetSchedule.fixed(96)), "own_schedule"),
        # The server decodes densely.
        ({}, RequestOption(DENSE), "dense"),
    ],
)
def test_a_request_is_audited_or_counted_by_the_reason(
    changes: dict[str, Any], option: RequestOption | None, reason: str | None
) -> None:
    active = DENSE if reason == "dense" else ACTIVE
    assert skip_reason(tokenized(**changes), option, active) == reason
    assert {"input", "own_schedule", "dense"} == {*SKIPPED}


def test_requests_beyond_the_slots_are_dropped_and_slots_are_used_again() -> None:
    outcomes: Counter[str] = Counter()
    queue = AuditQueue(outcomes)
    for round in range(3):
        requests = [tokenized(rid=str(index)) for index in range(AUDIT_SLOTS + 2)]
        shared = requests[0].sampling_params
        for request in requests:
            queue.start(request, None)
        assert outcomes["dropped"] == 2 * (round + 1)
        recorded = [request.sampling_params.custom_params for request in requests]
        slots = [params["sparrow_record"][0] for params in recorded[:AUDIT_SLOTS]]
        assert sorted(slots) == [*range(AUDIT_SLOTS)] and recorded[AUDIT_SLOTS:] == [None, None]
        assert shared.custom_params is None
        for index in range(AUDIT_SLOTS):
            answers: Any = SimpleNamespace(output_ids=[[7, 8]], dp_ranks=None)
            queue.record(f"{index}", answers, 0)
            queue.finish(f"{index}", complete=True)
        while queue.first is not None:
            queue.free(queue.take_first())


@pytest.mark.parametrize("new_tokens", [0, 8])
def test_a_user_gets_no_slot_of_the_audit(new_tokens: int) -> None:
    request = tokenized(
        rid="a", custom_params={"sparrow_record": [0, 2], "mine": 1}, max_new_tokens=new_tokens
    )
    before = request.sampling_params
    manager: Any = SimpleNamespace(
        server_args=SimpleNamespace(enable_metrics=False),
        rid_to_state={"a": SimpleNamespace(obj=SimpleNamespace(log_metrics=False))},
        is_pause=False,
        gracefully_exit=False,
    )

    async def receive() -> None:
        Auditor(manager, 1.0, ACTIVE, set()).on_requests([request])

    asyncio.run(receive())
    custom = request.sampling_params.custom_params
    assert custom["mine"] == 1 and custom["sparrow_record"] is None
    assert before.custom_params["sparrow_record"] == [0, 2]


def test_an_error_of_the_record_ends_it_and_not_the_scheduler(monkeypatch) -> None:
    budgets: Any = None
    state = SchedulerState(budgets, record=(1, 8), compared=[(0, 1)], mode=Mode())
    monkeypatch.setattr(PROCESS, "scheduler", state)
    output, any_mode = object(), SimpleNamespace(is_decode=lambda: True, is_extend=lambda: True)
    no: Any = None
    batch: Any = SimpleNamespace(forward_mode=any_mode)
    assert keep_or_compare(lambda *_: output, no, no, no, no, batch) is output
    assert state.record is None and not state.compared


def test_responses_of_old_weights_are_forgotten_before_and_after_an_update() -> None:
    manager: Any = SimpleNamespace(
        server_args=SimpleNamespace(enable_metrics=False), is_pause=False
    )
    auditor = Auditor(manager, 1.0, ACTIVE, set())
    queue = auditor._queue

    def answered(name: str) -> None:
        queue.start(tokenized(rid=name), None)
        queue._recording[name].tokens.append(1)
        queue.finish(name, complete=True)
        assert queue.first is not None

    async def update() -> None:
        answered("before")
        async with auditor.held_back(new_weights=True):
            assert queue.first is None
            # By the old weights, while the update waits for the request to end.
            answered("meanwhile")
        assert queue.first is None

    asyncio.run(update())
    assert auditor.report.requests["dropped"] == 2
