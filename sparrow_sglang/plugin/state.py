"""State that this package keeps in SGLang's launching process and in its schedulers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow_sglang.attention_backends.decode_guard import DecodeGuard
from sparrow_sglang.schedules.options import ATTRIBUTE, RequestError, RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sparrow_sglang.attention_backends.budget_table import BudgetTable
    from sparrow_sglang.plugin.launcher.audit.auditor import Auditor
    from sparrow_sglang.plugin.mode import Mode
    from sparrow_sglang.plugin.scheduler.weight_checks import Checkpoint


@dataclass
class ServerState:
    """State that the launching process keeps for one server that decodes sparsely.

    Attributes:
        schedule: the active one, against which requests are validated; set by `switch` only.
        first: the schedule with which the server was started.
        calls: coroutines by the name that `Endpoint.call_sparrow` takes; some have a route, too.
        auditor: None without --sparrow-audit-rate and --enable-metrics.
        released: tags of the memory that is currently released.
        resuming: held while memory is resumed.
        weight_update: held open between SGLang's calls that begin and end an update of weights.
        measures_dense: whether `control.measure_once` times steps or rounds.
        measuring: the task that does so, once the first request has arrived.
        dense_tokens: what it measured, the least `dense_tokens` of the active schedule.
    """

    schedule: BudgetSchedule
    first: BudgetSchedule
    calls: Mapping[str, Callable[..., Awaitable[dict[str, Any]]]] = field(default_factory=dict)
    auditor: "Auditor | None" = None
    released: set[str] = field(default_factory=set)
    resuming: asyncio.Lock = field(default_factory=asyncio.Lock)
    weight_update: AsyncExitStack | None = None
    mode: "Mode" = field(kw_only=True)
    measures_dense: bool = False
    measuring: asyncio.Task[None] | None = None
    dense_tokens: int = 0

    def released_message(self) -> str:
        tags = ", ".join(sorted(self.released))
        return f"memory is released ({tags}): call /resume_memory_occupation first"

    def switch(self, schedule: BudgetSchedule) -> None:
        """Validate requests and audit under `schedule` from now on."""
        self.schedule = schedule
        if self.auditor is not None:
            self.auditor.set_schedule(schedule)


@dataclass
class SchedulerState:
    """State of a scheduler that decodes sparsely.

    Attributes:
        budgets: the active schedule and the requests' options, on the device.
        guard: receives an announcement of each decode batch.
        record: slots and steps per slot of `exact_acceptance`; None where nothing is recorded.
        compared: of each request of the latest prefill, slot and number of prompt tokens if it is
            compared.
        checkpoint: what new weights are compared with.
        updated: names of the weights that the update in progress has brought.
    """

    budgets: "BudgetTable"
    guard: DecodeGuard = field(default_factory=DecodeGuard)
    record: tuple[int, int] | None = None
    mode: "Mode" = field(kw_only=True)
    compared: list[tuple[int, int] | None] = field(default_factory=list)
    checkpoint: "Checkpoint | None" = None
    updated: set[str] = field(default_factory=set)

    def option(self, req: "Req") -> RequestOption:
        """The option of a request, during which the schedule is not switched."""
        active = self.budgets.schedule
        try:
            return RequestOption.read(req.sampling_params.custom_params, active)
        except RequestError:
            # The launching process refuses the request.
            return RequestOption(active)


class Hook(NamedTuple):
    """One hook into SGLang, a row of a table of hooks. SGLang replaces a hooked function in every
    module that has imported it.

    Attributes:
        kind: name of a HookType.
        parameters: names of the target's first parameters that `function` reads, without self;
            "a|b" where versions of SGLang differ, "*a" for one that may be at any position.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    parameters: str = ""


@dataclass
class ProcessState:
    """Outcome of the registration in this process, how it decodes once the model is loaded, and its
    scheduler once the backend is built."""

    hooks: tuple[Hook, ...] = ()
    error: Exception | None = None
    decoding: "tuple[Mode, BudgetSchedule] | None" = None
    scheduler: SchedulerState | None = None


PROCESS = ProcessState()


def server_state(manager: Any) -> ServerState | None:
    """The state of a TokenizerManager's server, None if the server uses another backend."""
    return getattr(manager, ATTRIBUTE, None)


def require_server_state(manager: Any) -> ServerState:
    return getattr(manager, ATTRIBUTE)


def require_scheduler_state() -> SchedulerState:
    assert PROCESS.scheduler is not None, "the attention backend has not been built in this process"
    return PROCESS.scheduler


def require_decoding() -> "tuple[Mode, BudgetSchedule]":
    assert PROCESS.decoding is not None, "no model has been loaded in this process"
    return PROCESS.decoding
