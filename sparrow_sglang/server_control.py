"""The server's side of run-time control: requests are checked, and the schedule can be switched.

A call goes from the launching process, which holds the HTTP routes and hands out the requests, to
every scheduler and back over SGLang's own channel for control messages. Calls are coroutines on
SGLang's tokenizer manager, `sparrow_<name>`; the HTTP route of a call is /sparrow/<name>.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sparrow_sglang import hooks
from sparrow_sglang.announce import announce, describe
from sparrow_sglang.hooks import Hook
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.refusals import uses_sparrow
from sparrow_sglang.request_options import RequestOption
from sparrow_sglang.schedule import (
    FIXED_NAME,
    BudgetSchedule,
    ScheduleError,
    known_schedules,
    load_schedule,
)
from sparrow_sglang.server_args import FIELD, resolve_schedules

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

ROUTE = "/sparrow/schedule"
_MESSAGE = "sparrow_schedule"
_IDLE_TIMEOUT_S = 30.0
# A pause that aborts the requests returns before the scheduler has left its last step.
_PAUSED_TIMEOUT_S = 1.0


class ControlError(ValueError):
    """The server cannot do now what it was asked for; the message says why."""


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
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None:
        _add_routes(http_server.app)


def check_request(request: Any, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> None:
    """AFTER hook: refuse a request that asks for what there is not.

    Checked with 0.5.17, where every request passes through `_create_tokenized_object`, and a
    ValueError there reaches the caller of `Engine.generate`, or becomes HTTP 400.

    Raises:
        RequestOptionError: see `RequestOption.read`.
    """
    loaded: LoadedSchedules | None = getattr(manager, "sparrow_loaded", None)
    if loaded is not None:
        RequestOption.read(request.sampling_params.custom_params, loaded)


async def schedule(
    manager: "TokenizerManager", schedule: Mapping[str, Any] | str | None = None
) -> dict[str, Any]:
    """Read the schedule in force, or put another one in force.

    As SGLang's own weight updates do, a switch waits until no request is running and holds new
    ones back meanwhile. It then empties the prefix cache.

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
        return await _tell_schedulers(manager, {})
    control: Any = manager
    wanted = _wanted(schedule, control.sparrow_loaded)
    control.sparrow_loaded.require_fit(wanted)
    async with manager.is_pause_cond:
        paused = manager.is_pause
    # Paused requests would never give the lock back.
    async with nullcontext() if paused else manager.model_update_lock.writer_lock:
        flushed = await manager.flush_cache(_PAUSED_TIMEOUT_S if paused else _IDLE_TIMEOUT_S)
        if not flushed.success:
            reason = "generation is paused with requests" if paused else "requests are running"
            raise ControlError(
                f"the schedule was not switched: {reason}; abort them or let them finish"
            )
        answer = await _tell_schedulers(manager, {"schedule": wanted.model_dump(mode="json")})
        control.sparrow_loaded = control.sparrow_loaded.with_in_force(wanted)
        manager.record_config_updates("sparrow", **{FIELD: ",".join(control.sparrow_loaded.names)})
    return answer


def answer_control(
    original: Callable[..., None], scheduler: "Scheduler", message: "DumperControlReqInput"
) -> None:
    """AROUND hook: take our messages out of a channel that carries JSON to every scheduler.

    SGLang's channel for settings carries numbers only. Checked with 0.5.17, where all ranks handle
    a message at the same point between two steps, and one rank per replica answers.
    """
    if message.method != _MESSAGE:
        return original(scheduler, message)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    try:
        output = DumperControlReqOutput(success=True, response=[_serve(scheduler, message.body)])
    except Exception as error:
        # Whatever it is, the caller must hear of it: it waits for an answer.
        output = DumperControlReqOutput(success=False, response=[], error=str(error))
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, message)
    return None


def _serve(scheduler: "Scheduler", body: dict[str, Any]) -> dict[str, Any]:
    """In a scheduler: switch where the message holds a schedule, then say what is in force."""
    budgets = hooks.budgets_in_use()
    previous = budgets.loaded.in_force
    if "schedule" in body:
        new = BudgetSchedule(**body["schedule"])
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


async def _tell_schedulers(manager: "TokenizerManager", body: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import DumperControlReqInput

    outputs = await manager.dumper_control(DumperControlReqInput(method=_MESSAGE, body=body))
    for output in outputs:
        if not output.success:
            raise ControlError(output.error)
    answer: dict[str, Any] = outputs[0].response[0]
    return answer


def _add_routes(app: "FastAPI") -> None:
    """GET and POST /sparrow/schedule, behind the same keys as SGLang's own control routes."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if any(getattr(route, "path", None) == ROUTE for route in app.routes):
        return

    async def handle(request: Request) -> "Response":
        from sglang.srt.entrypoints.http_server import get_global_state

        manager: Any = get_global_state().tokenizer_manager
        try:
            fields = await _body(request) if request.method == "POST" else {}
            return JSONResponse(await manager.sparrow_schedule(**fields))
        except ValueError as error:
            content = {"error": {"message": str(error)}}
            return JSONResponse(content, status_code=HTTPStatus.BAD_REQUEST)

    app.add_api_route(ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(handle), methods=["GET", "POST"])


async def _body(request: "Request") -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or set(body) != {"schedule"} or body["schedule"] is None:
        raise ControlError(
            'the body is wrong: expected a JSON object {"schedule": ...}, a name or the fields of a'
            " schedule"
        )
    return body


HOOKS = (
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", offer_control, "AFTER"),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        check_request,
        "AFTER",
    ),
    Hook("sglang.srt.managers.scheduler.Scheduler.handle_dumper_control", answer_control, "AROUND"),
)
