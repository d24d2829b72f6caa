"""Calls from the launching process to every scheduler, over SGLang's control messages."""

import asyncio
import reprlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.sglang_compat.versions import can_flush, ranks

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

Handler = Callable[["Scheduler", dict[str, Any]], dict[str, Any]]

_PREFIX = "sparrow_"
_IDLE = "idle"
_IDLE_TIMEOUT_S = 30.0
# A pause that aborts the requests returns before the scheduler has left its last step.
_PAUSED_TIMEOUT_S = 1.0
_POLL_S = 0.02

_handlers: dict[str, Handler] = {}


class ControlError(InputError):
    """The server cannot do what was requested."""


class RanksDisagreeError(ControlError):
    """Ranks of the server are in different states."""


def scheduler_rpc(call: str) -> Callable[[Handler], Handler]:
    """Have the decorated function answer `call` in every scheduler, or refuse it by raising."""

    def register(handler: Handler) -> Handler:
        _handlers[_PREFIX + call] = handler
        return handler

    return register


async def call_schedulers(
    manager: "TokenizerManager", call: str, fields: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The answer of each data-parallel rank to `call`, by `rank_name`. Raises `ControlError` if
    some schedulers refused; the others may have done what was requested."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    try:
        msgspec.msgpack.encode(fields)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ControlError(f"{call}: SGLang's messages cannot carry it ({error})") from None
    outputs = await manager.dumper_control(
        DumperControlReqInput(method=_PREFIX + call, body=fields)
    )
    refusals = [output.error for output in outputs if not output.success]
    if refusals:
        raise ControlError("; ".join(sorted(refusals)))
    responses = (output.response[0] for output in outputs)
    return {response["rank"]: response["answer"] for response in responses}


async def is_idle(
    manager: "TokenizerManager", wait_s: float = 0.0, retracted: bool = False
) -> bool:
    """Whether no scheduler has a request left, after waiting at most `wait_s`. With `retracted`,
    requests may be left that a pause has retracted, which hold no KV."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            await call_schedulers(manager, _IDLE, {"retracted": retracted})
            return True
        except ControlError:
            if time.monotonic() >= deadline:
                return False
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def requests_blocked(
    manager: "TokenizerManager", what: str, timeout_s: float | None = None
) -> AsyncIterator[float]:
    """Within this context no request is answered and new ones are blocked. Waits for the running
    requests, unless they are paused, and logs that `what` waits. Yields how long the scheduler may
    still need until it is idle, in seconds. Raises `ControlError` if requests still run after
    `timeout_s`; new ones are served again."""
    async with manager.is_pause_cond:
        paused = manager.is_pause
    if paused:
        yield _PAUSED_TIMEOUT_S
        return
    lock = manager.model_update_lock
    if running := list(manager.rid_to_state):
        listed = f"{', '.join(running[:3])}{', ...' if len(running) > 3 else ''}"
        announce(f"{what} waits for {len(running)} requests ({listed}); new requests wait, too")
    try:
        await asyncio.wait_for(lock.acquire_writer(), timeout_s)
    except TimeoutError:
        async with lock._cond:
            # A writer that gives up does not wake the readers that have waited for it.
            lock._cond.notify_all()
        raise ControlError(
            f"{what}: {len(manager.rid_to_state)} requests run after timeout_s={timeout_s:g}; abort"
            " them or let them finish"
        ) from None
    try:
        yield _IDLE_TIMEOUT_S
    finally:
        await lock.release_writer()


@asynccontextmanager
async def idle(
    manager: "TokenizerManager", what: str, timeout_s: float | None = None
) -> AsyncIterator[None]:
    """As `requests_blocked`, with no request left in a scheduler. Raises `ControlError`."""
    async with requests_blocked(manager, what, timeout_s) as wait_s:
        if not await is_idle(manager, wait_s):
            reason = "requests are paused" if manager.is_pause else "SGLang is busy"
            raise ControlError(f"{what}: {reason}; abort the requests or let them finish")
        yield


async def flush(manager: "TokenizerManager", timeout_s: float | None = _IDLE_TIMEOUT_S) -> None:
    """Empty the prefix cache of every data-parallel rank; `ControlError` where one is not idle."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    control: Any = manager
    outputs = await control.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    if not all(output.success for output in outputs):
        raise ControlError("the prefix cache was not emptied: requests are running")


@scheduler_rpc(_IDLE)
def _require_idle(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    if not (can_flush(scheduler) if fields["retracted"] else scheduler.is_fully_idle()):
        raise ControlError("requests are running")
    return {}


def answer_call(
    original: Callable[..., None], scheduler: "Scheduler", message: "DumperControlReqInput"
) -> None:
    """AROUND hook: answer our messages, sent over SGLang's dumper control, which carries JSON.
    SGLang's channel for settings carries numbers only. All ranks of a replica handle a message at
    the same point between two steps, and one of them answers."""
    handler = _handlers.get(message.method)
    if handler is None:
        return original(scheduler, message)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    local = _Outcome(rank_name(scheduler), {})
    try:
        local = local._replace(answer=handler(scheduler, message.body))
    except Exception as error:
        # Any exception, because the caller waits for an answer.
        local = local._replace(error=str(error) or type(error).__name__)
    outcome = _reduce_tp(scheduler, local)
    output = DumperControlReqOutput(
        success=not outcome.error,
        response=[{"rank": outcome.rank, "answer": outcome.answer}],
        error=outcome.error,
    )
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, message)
    return None


def rank_name(scheduler: "Scheduler") -> str:
    """Which scheduler of the server this is, such as `dp rank 1, tp rank 0`."""
    replica = _replica(scheduler)
    tp_rank = f"tp rank {ranks(scheduler).attn_tp_rank}"
    return tp_rank if replica is None else f"dp rank {replica}, {tp_rank}"


def _replica(scheduler: "Scheduler") -> int | None:
    ps = ranks(scheduler)
    return ps.attn_dp_rank if ps.attn_dp_size > 1 else ps.dp_rank


class _Outcome(NamedTuple):
    rank: str
    answer: dict[str, Any]
    error: str = ""


def _reduce_tp(scheduler: "Scheduler", local: _Outcome) -> _Outcome:
    outcomes = gather_tp(scheduler, local)
    failed = [outcome for outcome in outcomes if outcome.error]
    if not failed:
        if all(outcome.answer == local.answer for outcome in outcomes):
            return local
        answers = "; ".join(f"{out.rank}: {reprlib.repr(out.answer)}" for out in outcomes)
        return local._replace(error=f"tensor-parallel ranks differ: {answers}")
    if _replica(scheduler) is None and len(outcomes) == 1:
        return local
    return local._replace(error="; ".join(f"{out.rank}: {out.error}" for out in failed))


def gather_tp(scheduler: "Scheduler", local: Any) -> list[Any]:
    """The `local` of each tensor-parallel rank of this scheduler's replica."""
    size = ranks(scheduler).attn_tp_size
    if size == 1:
        return [local]
    import torch

    gathered = [None] * size
    torch.distributed.all_gather_object(gathered, local, group=scheduler.attn_tp_cpu_group)
    return gathered
