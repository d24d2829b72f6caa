"""Everything that this package keeps in a process of SGLang; no other module has state of its own.

SGLang runs a launching process, whose TokenizerManager sees every request, and schedulers.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparrow_sglang.loaded_schedules import LoadedSchedules

if TYPE_CHECKING:
    from sparrow_sglang.attention_backends.metadata import BudgetTable
    from sparrow_sglang.plugin.audit.auditor import Auditor
    from sparrow_sglang.plugin.exact_acceptance import Place, StepRecord
    from sparrow_sglang.plugin.hooks import Hook

ATTRIBUTE = "sparrow"
"""Of SGLang's TokenizerManager: its `ServerState`, the only attribute that is set on it."""


@dataclass
class ServerState:
    """What the launching process keeps for one server that decodes sparsely.

    Attributes:
        loaded: what requests are checked against, the active schedule among it.
        calls: coroutines behind the server's routes /sparrow/<name> and `Endpoint.call_sparrow`.
        auditor: None without --sparrow-audit-rate.
        module_shapes: [out, in] of the model's linear modules, once an adapter has been pushed.
    """

    loaded: LoadedSchedules
    calls: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = field(default_factory=dict)
    auditor: "Auditor | None" = None
    module_shapes: dict[str, tuple[int, int]] | None = None


@dataclass
class SchedulerState:
    """What a scheduler that decodes sparsely keeps.

    Attributes:
        budgets: the schedules and what requests ask for, on the device.
        audited: whether some requests of this server are audited.
        record: hidden states of decode steps, in a server that records them.
        compared: requests of the latest prefill pass whose steps are compared, by their ids.
    """

    budgets: "BudgetTable"
    audited: bool = False
    record: "StepRecord | None" = None
    compared: "dict[str, Place]" = field(default_factory=dict)


@dataclass
class ProcessState:
    """What the registration did in this process, and the scheduler that runs in it.

    Attributes:
        hooks: what SGLang was told to apply.
        error: why the registration failed, None if it did not.
        scheduler: None in other processes, and until the backend has been built.
    """

    hooks: "tuple[Hook, ...]" = ()
    error: Exception | None = None
    scheduler: SchedulerState | None = None


PROCESS = ProcessState()


def server_state(manager: Any) -> ServerState | None:
    """The state of a TokenizerManager's server, None if that decodes by another backend."""
    state: ServerState | None = getattr(manager, ATTRIBUTE, None)
    return state


def require_server_state(manager: Any) -> ServerState:
    """As `server_state`, where the server is known to decode sparsely."""
    state = server_state(manager)
    assert state is not None, "the server decodes by another backend"
    return state


def require_scheduler_state() -> SchedulerState:
    """The state of this process' scheduler, once the attention backend has been built."""
    assert PROCESS.scheduler is not None, "the attention backend has not been built in this process"
    return PROCESS.scheduler
