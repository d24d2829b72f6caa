"""The switch of the schedule, in the launching process and in every scheduler; to what a request
names, and to the lengths that decode densely once steps have been timed."""

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparrow_sglang.json_values import quoted
from sparrow_sglang.plugin.scheduler_calls import (
    ControlError,
    RanksDisagreeError,
    call_schedulers,
    idle,
    rank_name,
    scheduler_rpc,
)
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.plugin.state import ServerState, require_scheduler_state, require_server_state
from sparrow_sglang.schedules.names import fixed_tokens, known_schedules, load_schedule
from sparrow_sglang.schedules.schedule import DENSE, DRAFTS, BudgetSchedule, ScheduleError
from sparrow_sglang.sglang_compat.arguments import resolved
from sparrow_sglang.validation import nearest_first

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger("sparrow_sglang")

_CALL = "schedule"
_MEASURE = "measure"


async def measure_once(manager: "TokenizerManager") -> None:
    """Before the first request, have short sequences decode densely where that is faster, or rounds
    draft as many tokens as pay. Data-parallel replicas take the largest length that one of them has
    measured."""
    state = require_server_state(manager)
    if state.measuring is None:
        if not state.measures_dense or state.released:
            return
        state.measuring = asyncio.ensure_future(_measure_all(manager))
    # The request that started it may be cancelled.
    await asyncio.shield(state.measuring)


async def _measure_all(manager: "TokenizerManager") -> None:
    state = require_server_state(manager)
    try:
        by_rank = await call_schedulers(manager, _MEASURE, {})
        tokens = max(answer["tokens"] for answer in by_rank.values())
        if tokens:
            new = state.schedule.dense_below(tokens)
            await _switch_all(manager, state.schedule, new)
            state.dense_tokens = tokens
            state.switch(new)
            announce(f"decode is dense up to {tokens:,} tokens, where sparse steps are slower")
    except ControlError as error:
        logger.warning("decode steps were not timed: %s", error)


@scheduler_rpc(_MEASURE)
def _measure(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": require_scheduler_state().mode.measure(scheduler)}


async def schedule(
    manager: "TokenizerManager",
    schedule: Mapping[str, Any] | str | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Return the active schedule, or switch to another one while no request runs.

    Args:
        schedule: the fields of a `BudgetSchedule`, the name of a shipped one or of the server's
            first, fixed-<tokens>, or "dense"; None only returns the active one.
        timeout_s: how long to wait for the running requests, while new ones wait; None for ever.

    Returns:
        `schedule`, the fields of the active schedule; `previous`, those of the one active before;
        `warning`, if the active one was calibrated for another model, else None.

    Raises:
        ScheduleError: the schedule is unknown, wrong or does not fit this server.
        ControlError: requests are paused or still running after `timeout_s`, or a scheduler
            refused; all keep what they had.
        RanksDisagreeError: the schedulers hold different schedules.
    """
    state, hf_config = require_server_state(manager), manager.model_config.hf_config
    await measure_once(manager)
    previous = state.schedule
    if schedule is None:
        await _require_agreement(manager, previous)
        return _answer(previous, previous, hf_config)
    if timeout_s is not None:
        require_seconds(timeout_s)
    new = _schedule(schedule, state, hf_config)
    if not new.is_dense:
        new = new.dense_below(state.dense_tokens)
    new.require_switch_from(state.first)
    async with idle(manager, "a switch of the schedule", timeout_s):
        # Another switch may have come first.
        previous = state.schedule
        await _switch_all(manager, previous, new)
        state.switch(new)
        if state.mode.times_each_schedule and state.measures_dense and not state.released:
            await _measure_all(manager)
    return _answer(new, previous, hf_config)


def require_seconds(timeout_s: Any) -> None:
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (is_number and timeout_s > 0):
        raise ControlError(f"timeout_s={quoted(timeout_s)}: expected seconds, more than 0")


async def _switch_all(
    manager: "TokenizerManager", previous: BudgetSchedule, new: BudgetSchedule
) -> None:
    """Have every scheduler hold `new`; raises `ControlError` if all hold `previous` instead, and
    `RanksDisagreeError` if some do."""
    try:
        await _require_agreement(manager, new, load=True)
    except ControlError as refusal:
        try:
            await _require_agreement(manager, previous, load=True)
        except ControlError as stuck:
            raise RanksDisagreeError(
                f"the schedule was not switched on every rank ({refusal}), and not all could go"
                f" back ({stuck}): set a schedule again, or restart the server"
            ) from None
        raise ControlError(f"the schedule was not switched: {refusal}") from None


async def _require_agreement(
    manager: "TokenizerManager", expected: BudgetSchedule, load: bool = False
) -> None:
    """Raise `RanksDisagreeError` unless every scheduler holds `expected`, once it is to `load`."""
    by_rank = await call_schedulers(manager, _CALL, _fields(expected) if load else {})
    if any(answer != _fields(expected) for answer in by_rank.values()):
        ranks = [f"{rank}: {answer['name']}" for rank, answer in sorted(by_rank.items())]
        raise RanksDisagreeError(
            f"ranks hold different schedules ({'; '.join(ranks)}): expected {expected.name}; set a"
            " schedule again, or restart the server"
        )


def _answer(active: BudgetSchedule, previous: BudgetSchedule, hf_config: Any) -> dict[str, Any]:
    warning = None
    if active.is_foreign(hf_config):
        warning = f"schedule {active.name} is {active.describe_calibration(hf_config)}"
    return {"schedule": _fields(active), "previous": _fields(previous), "warning": warning}


def _fields(schedule: BudgetSchedule) -> dict[str, Any]:
    return schedule.model_dump(mode="json")


@scheduler_rpc(_CALL)
def _switch(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    """Load the schedule of the message, if it has one; return the active one."""
    budgets = require_scheduler_state().budgets
    previous = budgets.schedule
    if fields and (schedule := BudgetSchedule(**fields)) != previous:
        budgets.load(schedule)
        if schedule == previous.dense_below(schedule.dense_tokens):
            return fields
        view, hf_config = resolved(scheduler.server_args), scheduler.model_config.hf_config
        line = require_scheduler_state().mode.describe(view, schedule, hf_config)
        announce(f"{rank_name(scheduler)}: schedule {previous.name} is replaced: {line}")
    return _fields(budgets.schedule)


def _schedule(schedule: Any, state: ServerState, hf_config: Any) -> BudgetSchedule:
    first = state.first
    if isinstance(schedule, Mapping):
        return BudgetSchedule(**schedule).for_model(hf_config)
    if schedule == DENSE:
        return first.as_dense()
    if schedule == first.name:
        return first
    if isinstance(schedule, str) and (tokens := fixed_tokens(schedule)) is not None:
        return first.as_fixed(tokens)
    if schedule in (DRAFTS, *known_schedules()):
        return load_schedule(schedule, first.page_size).for_model(hf_config)
    nearest = nearest_first(str(schedule), known_schedules())[:5]
    raise ScheduleError(
        f"schedule={quoted(schedule, 60)}: expected a schedule's fields, {DENSE!r},"
        f" fixed-<tokens>, {first.name}, or a shipped name, such as {', '.join(nearest)}"
    )
