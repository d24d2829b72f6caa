"""The server's side of run-time control: the schedule can be switched, landmarks be checked.

Calls are coroutines on SGLang's tokenizer manager, `sparrow_<name>`; the HTTP route of a call is
/sparrow/<name>, see `sparrow_sglang.server_routes`.
"""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from sparrow_sglang import control_channel, hooks, request_hooks
from sparrow_sglang.announce import announce, describe
from sparrow_sglang.control_channel import ControlError, answers, idle, tell_schedulers
from sparrow_sglang.hooks import Hook
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.refusals import uses_sparrow
from sparrow_sglang.schedule import (
    FIXED_NAME,
    BudgetSchedule,
    ScheduleError,
    known_schedules,
    load_schedule,
)
from sparrow_sglang.server_adapter import load_serialised
from sparrow_sglang.server_args import FIELD, resolve_schedules
from sparrow_sglang.server_routes import add_routes

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_CALL = "schedule"
_CHECK = "landmarks"


def offer_control(result: None, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> None:
    """AFTER hook: what the launching process must know to check requests and to switch.

    Checked with 0.5.17, where the tokenizer manager is made once per server, after the HTTP app.
    """
    if not uses_sparrow(manager.server_args):
        return
    control: Any = manager
    control.sparrow_loaded, _ = resolve_schedules(
        manager.server_args, manager.model_config.hf_config
    )
    control.sparrow_schedule = partial(schedule, manager)
    control.sparrow_landmarks = partial(landmarks, manager)
    control.sparrow_adapter = partial(load_serialised, manager)
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None:
        add_routes(http_server.app)


async def schedule(
    manager: "TokenizerManager", schedule: Mapping[str, Any] | str | None = None
) -> dict[str, Any]:
    """Read the schedule in force, or put another one in force, while no request runs.

    Args:
        schedule: the fields of a `BudgetSchedule`, the name of a loaded or shipped one, or
            fixed-<tokens>; None to read only.

    Returns:
        `schedule`, the fields of what is in force now; `previous`, of what was before; `loaded`,
        the names that requests may use.

    Raises:
        ScheduleError: the schedule is unknown, wrong or does not fit this server.
        ControlError: requests are paused, or a scheduler refused.
    """
    if schedule is None:
        return await tell_schedulers(manager, _CALL, {})
    control: Any = manager
    wanted = _wanted(schedule, control.sparrow_loaded)
    control.sparrow_loaded.require_fit(wanted)
    async with idle(manager, "the schedule was not switched"):
        answer = await tell_schedulers(manager, _CALL, {"schedule": wanted.model_dump(mode="json")})
        control.sparrow_loaded = control.sparrow_loaded.with_in_force(wanted)
        manager.record_config_updates("sparrow", **{FIELD: ",".join(control.sparrow_loaded.names)})
    return answer


async def landmarks(manager: "TokenizerManager") -> dict[str, Any]:
    """Recompute every landmark in use and compare, while no request runs; a debugging aid.

    Returns:
        `pages`, the number of pages whose landmarks are right.

    Raises:
        ControlError: a landmark is wrong; the message names the first one.
    """
    async with manager.is_pause_cond:
        paused = manager.is_pause
    async with nullcontext() if paused else manager.model_update_lock.writer_lock:
        return await tell_schedulers(manager, _CHECK, {})


@answers(_CHECK)
def _check(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    from sparrow_sglang.attention_backends.landmark_check import check_landmarks, live_pages

    check_landmarks(scheduler)
    return {"pages": len(live_pages(scheduler))}


@answers(_CALL)
def _switch(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    """In a scheduler: switch where the message holds a schedule, then say what is in force."""
    budgets = hooks.budgets_in_use()
    previous = budgets.loaded.in_force
    if "schedule" in fields:
        new = BudgetSchedule(**fields["schedule"])
        loaded = budgets.loaded.with_in_force(new)
        if not scheduler.flush_cache(empty_cache=False):
            raise ControlError("the schedule was not switched: requests are running")
        budgets.load(loaded)
        announce(
            f"rank {scheduler.ps.tp_rank}: schedule {previous.name} is replaced, prefix cache"
            f" empty: {describe(new, 'set_schedule')}"
        )
    return {
        "schedule": budgets.loaded.in_force.model_dump(mode="json"),
        "previous": previous.model_dump(mode="json"),
        "loaded": list(budgets.loaded.names),
    }


def _wanted(schedule: Any, loaded: LoadedSchedules) -> BudgetSchedule:
    if isinstance(schedule, Mapping):
        return BudgetSchedule(**schedule)
    if schedule in loaded.names:
        return loaded.get(schedule)
    if isinstance(schedule, str) and (FIXED_NAME.fullmatch(schedule) or _is_shipped(schedule)):
        return load_schedule(schedule, loaded.in_force.page_size)
    raise ScheduleError(
        f"schedule={schedule!r} is not known to this server: expected the fields of a schedule as"
        f" a JSON object, fixed-<tokens>, or one of"
        f" {', '.join(dict.fromkeys([*loaded.names, *known_schedules()]))}"
    )


def _is_shipped(name: str) -> bool:
    return name in known_schedules()


HOOKS = (
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", offer_control, "AFTER"),
    *control_channel.HOOKS,
    *request_hooks.HOOKS,
)
