"""Calls from the launching process to every scheduler, over SGLang's control messages.

In: the name of a call and JSON fields. Out: one JSON answer per data-parallel rank, or refusals.
"""

import reprlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow_sglang.errors import InputError
from sparrow_sglang.sglang_versions import ranks

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


class ControlError(InputError):
    """The server cannot do what it was asked for; the message says why."""


class RanksDisagreeError(ControlError):
    """Ranks of the server are in different states; the message says which, and the remedy."""


def scheduler_rpc(call: str) -> Callable[[Answer], Answer]:
    """Have the decorated function answer `call` in every scheduler.

    The function gets the scheduler and the call's fields; if it raises, the call is refused.
    """

    def register(answer: Answer) -> Answer:
        _answers[_PREFIX + call] = answer
        return answer

    return register


async def call_schedulers(
    manager: "TokenizerManager", call: str, fields: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Make every scheduler answer `call`.

    Returns:
        The answer of each data-parallel rank under its name, see `rank_name`; the tensor-parallel
        ranks of each have given the same.

    Raises:
        ControlError: some schedulers refused, for the reasons that the message gives. The others
            may have done what they were asked for.
    """
    from sglang.srt.managers.io_struct import DumperControlReqInput

    outputs = await manager.dumper_control(
        DumperControlReqInput(method=_PREFIX + call, body=fields)
    )
    refusals = [output.error for output in outputs if not output.success]
    if refusals:
        raise ControlError("; ".join(sorted(refusals)))
    responses = (output.response[0] for output in outputs)
    return {response["rank"]: response["answer"] for response in responses}


async def is_idle(manager: "TokenizerManager") -> bool:
    """Whether no scheduler holds a request or is still in the step that ended its last one."""
    try:
        await call_schedulers(manager, _IDLE, {})
    except ControlError:
        return False
    return True


@asynccontextmanager
async def idle(manager: "TokenizerManager", undone: str) -> AsyncIterator[None]:
    """Within this context no request runs, new ones are held back, and the prefix cache is empty.

    Waits for the running requests, as SGLang's own weight updates do. The error message begins with
    `undone`.

    Raises:
        ControlError: requests are paused and keep their KV, or SGLang remained busy.
    """
    async with manager.is_pause_cond:
        paused = manager.is_pause
    # Paused requests would never release the lock.
    async with nullcontext() if paused else manager.model_update_lock.writer_lock:
        if not await _flushed(manager, _PAUSED_TIMEOUT_S if paused else _IDLE_TIMEOUT_S):
            reason = "generation is paused with requests" if paused else "requests are running"
            raise ControlError(f"{undone}: {reason}; abort them or let them finish")
        yield


async def _flushed(manager: "TokenizerManager", timeout_s: float) -> bool:
    """Flush the prefix cache of every rank; returns whether all ranks succeeded.

    SGLang's own `flush_cache` returns only the first data-parallel rank's answer (0.5.17).
    """
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    control: Any = manager
    outputs = await control.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
    return all(output.success for output in outputs)


@scheduler_rpc(_IDLE)
def _require_idle(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    if not scheduler.is_fully_idle():
        raise ControlError("requests are running")
    return {}


def answer_call(
    original: Callable[..., None], scheduler: "Scheduler", message: "DumperControlReqInput"
) -> None:
    """AROUND hook: answer our messages, sent over SGLang's dumper control, which carries JSON.

    SGLang's channel for settings carries numbers only. Checked with 0.5.17, where all ranks of a
    replica handle a message at the same point between two steps, and one of them answers.
    """
    answer = _answers.get(message.method)
    if answer is None:
        return original(scheduler, message)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    outcome = _reduce_tp(scheduler, _outcome(answer, scheduler, message.body))
    output = DumperControlReqOutput(
        success=outcome.error is None,
        response=[{"rank": outcome.rank, "answer": outcome.answer}],
        error=outcome.error or "",
    )
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, message)
    return None


def rank_name(scheduler: "Scheduler") -> str:
    """Which scheduler of the server this is, such as `dp rank 1, tp rank 0`."""
    replica = _replica(scheduler)
    tp_rank = f"tp rank {ranks(scheduler).attn_tp_rank}"
    return tp_rank if replica is None else f"dp rank {replica}, {tp_rank}"


def _replica(scheduler: "Scheduler") -> int | None:
    """The rank in data parallelism or data-parallel attention; None without either."""
    ps = ranks(scheduler)
    rank: int | None = ps.attn_dp_rank if ps.attn_dp_size > 1 else ps.dp_rank
    return rank


class _Outcome(NamedTuple):
    """One scheduler's outcome of a call: its name, and an answer unless there is an error."""

    rank: str
    answer: dict[str, Any]
    error: str | None = None


def _outcome(answer: Answer, scheduler: "Scheduler", fields: dict[str, Any]) -> _Outcome:
    rank = rank_name(scheduler)
    try:
        return _Outcome(rank, answer(scheduler, fields))
    except Exception as error:
        # Report every kind of exception, because the caller waits for an answer.
        return _Outcome(rank, {}, str(error) or type(error).__name__)


def _reduce_tp(scheduler: "Scheduler", local: _Outcome) -> _Outcome:
    """The joint outcome of a replica's tensor-parallel ranks: an error if any of them failed."""
    ps = ranks(scheduler)
    outcomes: list[Any] = [local]
    if ps.attn_tp_size > 1:
        import torch

        outcomes = [None] * ps.attn_tp_size
        torch.distributed.all_gather_object(outcomes, local, group=scheduler.attn_tp_cpu_group)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        if all(outcome.answer == local.answer for outcome in outcomes):
            return local
        answers = "; ".join(f"{out.rank}: {reprlib.repr(out.answer)}" for out in outcomes)
        return local._replace(error=f"tensor-parallel ranks differ: {answers}")
    alone = _replica(scheduler) is None and len(outcomes) == 1
    errors = "; ".join(out.error if alone else f"{out.rank}: {out.error}" for out in failed)
    return local._replace(error=errors)
