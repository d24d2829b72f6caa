"""A call from the launching process to every scheduler and back, over SGLang's control messages.

In: the name of a call and JSON fields. Out: the JSON answer of one scheduler, or its refusal.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sparrow_sglang.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

Answer = Callable[["Scheduler", dict[str, Any]], dict[str, Any]]

_PREFIX = "sparrow_"
_IDLE = "idle"
_IDLE_TIMEOUT_S = 30.0
# A pause that aborts the requests returns before the scheduler has left its last step.
_PAUSED_TIMEOUT_S = 1.0

_answers: dict[str, Answer] = {}


class ControlError(ValueError):
    """The server cannot do now what it was asked for; the message says why."""


def answers(call: str) -> Callable[[Answer], Answer]:
    """Have the decorated function answer `call` in every scheduler.

    It gets the scheduler and the call's fields; an exception of it refuses the call.
    """

    def register(answer: Answer) -> Answer:
        _answers[_PREFIX + call] = answer
        return answer

    return register


async def tell_schedulers(
    manager: "TokenizerManager", call: str, fields: dict[str, Any]
) -> dict[str, Any]:
    """Make every scheduler answer `call`, and return what the first one said.

    Raises:
        ControlError: a scheduler refused, for the reason that the message gives.
    """
    from sglang.srt.managers.io_struct import DumperControlReqInput

    outputs = await manager.dumper_control(
        DumperControlReqInput(method=_PREFIX + call, body=fields)
    )
    for output in outputs:
        if not output.success:
            raise ControlError(output.error)
    answer: dict[str, Any] = outputs[0].response[0]
    return answer


async def is_idle(manager: "TokenizerManager") -> bool:
    """Whether no scheduler holds a request, nor is in the step that ended its last one."""
    try:
        await tell_schedulers(manager, _IDLE, {})
    except ControlError:
        return False
    return True


@asynccontextmanager
async def idle(manager: "TokenizerManager", undone: str) -> AsyncIterator[None]:
    """Within, no request runs, new ones are held back, and the prefix cache is empty.

    As SGLang's own weight updates do, waits for the running requests. `undone` begins the error.

    Raises:
        ControlError: requests are paused and keep their KV, or SGLang remained busy.
    """
    async with manager.is_pause_cond:
        paused = manager.is_pause
    # Paused requests would never give the lock back.
    async with nullcontext() if paused else manager.model_update_lock.writer_lock:
        flushed = await manager.flush_cache(_PAUSED_TIMEOUT_S if paused else _IDLE_TIMEOUT_S)
        if not flushed.success:
            reason = "generation is paused with requests" if paused else "requests are running"
            raise ControlError(f"{undone}: {reason}; abort them or let them finish")
        yield


@answers(_IDLE)
def _require_idle(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    if not scheduler.is_fully_idle():
        raise ControlError("requests are running")
    return {}


def answer_control(
    original: Callable[..., None], scheduler: "Scheduler", message: "DumperControlReqInput"
) -> None:
    """AROUND hook: take our messages out of a channel that carries JSON to every scheduler.

    SGLang's channel for settings carries numbers only. Checked with 0.5.17, where all ranks handle
    a message at the same point between two steps, and one rank per replica answers.
    """
    answer = _answers.get(message.method)
    if answer is None:
        return original(scheduler, message)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    try:
        output = DumperControlReqOutput(success=True, response=[answer(scheduler, message.body)])
    except Exception as error:
        # Whatever it is, the caller must hear of it: it waits for an answer.
        output = DumperControlReqOutput(success=False, response=[], error=str(error))
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, message)
    return None


HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler.handle_dumper_control", answer_control, "AROUND"),
)
