"""Guards of SGLang's control calls: what would end the scheduler is answered with what is wrong.

SGLang asserts in the scheduler that it is idle, or that memory has been released, and a failed
assertion ends it, and with it everybody's requests (0.5.17 and 0.5.23). Here the launching process
looks first. During these calls no score of the audit runs.
"""

import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.adapters import problem_of_load
from sparrow_sglang.plugin.scheduler_calls import ControlError, becomes_idle, drained
from sparrow_sglang.plugin.state import ServerState, server_state

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

Call = Callable[..., Coroutine[Any, Any, Any]]

logger = logging.getLogger("sparrow_sglang")


async def without_scores(call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: no score of the audit may run during the call.

    Checked with 0.5.17. A pause that is not an abort keeps the scheduler's requests, so a weight
    update would wait forever for a score to be answered; a flush fails while anything runs.
    """
    state = server_state(manager)
    if state is None:
        return await call(manager, *args, **kwargs)
    async with _without_scores(state):
        return await call(manager, *args, **kwargs)


async def check_weights(call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: as `without_scores`; SGLang's check may also overwrite the weights (0.5.17)."""
    state = server_state(manager)
    if state is None:
        return await call(manager, *args, **kwargs)
    async with _without_scores(state, new_weights=True):
        return await call(manager, *args, **kwargs)


async def update_weights(
    call: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: answer with a failure where the prefix cache could not be emptied afterwards.

    Checked with 0.5.17, whose scheduler asserts that it could; 0.5.23 answers with a failure, but
    serves the new weights.
    """
    state = server_state(manager)
    if state is None:
        return await call(manager, request, *args, **kwargs)
    async with _without_scores(state, new_weights=True):
        problem = await _update_problem(manager, state, request)
        if problem is not None:
            return False, f"the weights were not updated: {problem}"
        _warn_of_old_prefixes(state, request)
        return await call(manager, request, *args, **kwargs)


async def update_weights_from_disk(
    call: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: as `update_weights`, whose answer has one more number here (0.5.17)."""
    answer = await update_weights(call, manager, request, *args, **kwargs)
    return answer if len(answer) == 3 else (*answer, 0)


async def begin_weight_update(
    call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: no score runs until `end_weight_update`, as weights change in several calls.

    From 0.5.20 on weights are loaded in such a session.
    """
    state = server_state(manager)
    if state is None:
        return await call(manager, *args, **kwargs)
    async with AsyncExitStack() as session:
        await session.enter_async_context(_without_scores(state, new_weights=True))
        answer = await call(manager, *args, **kwargs)
        if answer[0]:
            state.weight_update = session.pop_all()
    return answer


async def end_weight_update(
    call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: end what `begin_weight_update` began."""
    answer = await call(manager, *args, **kwargs)
    state = server_state(manager)
    if answer[0] and state is not None and state.weight_update is not None:
        session, state.weight_update = state.weight_update, None
        await session.aclose()
    return answer


async def release_memory(
    call: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: refuse to release memory that requests use, or that is released already.

    Checked with 0.5.17, where a request without tags means all memory. Requests that arrive
    meanwhile wait. `check_request` refuses requests until the memory is back.
    """
    state = server_state(manager)
    if state is None:
        return await call(manager, request, *args, **kwargs)
    tags = _tags(request)
    async with _without_scores(state):
        if manager.server_args.enable_memory_saver and tags & state.released:
            raise ControlError(f"{_listed(tags & state.released)} is released already")
        if not manager.is_pause and await manager.model_update_lock.is_locked():
            raise ControlError("memory was not released: requests are running; let them finish")
        async with drained(manager, "a release of memory") as wait_s:
            if not await becomes_idle(manager, wait_s):
                raise ControlError("memory was not released: requests hold KV; let them finish")
            answer = await call(manager, request, *args, **kwargs)
            state.released |= tags
    return answer


async def resume_memory(
    call: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: refuse to resume memory that is not released."""
    state = server_state(manager)
    if state is None:
        return await call(manager, request, *args, **kwargs)
    tags = _tags(request)
    if missing := tags - state.released:
        raise ControlError(
            f"{_listed(missing)} is not released; expected tags of what is:"
            f" {_listed(state.released) or 'nothing'}"
        )
    answer = await call(manager, request, *args, **kwargs)
    state.released -= tags
    return answer


async def load_adapter(
    call: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: refuse an adapter that SGLang would load and then compute wrongly.

    Checked with 0.5.17, which compares factors with the config only at the first request that uses
    them, where a wrong shape ends the scheduler.
    """
    if server_state(manager) is not None and (problem := await problem_of_load(manager, request)):
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

        return LoadLoRAAdapterReqOutput(success=False, error_message=problem)
    return await call(manager, request, *args, **kwargs)


@asynccontextmanager
async def _without_scores(state: ServerState, new_weights: bool = False) -> AsyncIterator[None]:
    auditor = state.auditor
    if auditor is None:
        yield
        return
    async with auditor.held_back_for_new_weights() if new_weights else auditor.held_back():
        yield


async def _update_problem(
    manager: "TokenizerManager", state: ServerState, request: Any
) -> str | None:
    if "weights" in state.released:
        return 'their memory is released; call /resume_memory_occupation with tags ["weights"]'
    if not request.flush_cache:
        return None
    if request.abort_all_requests:
        manager.abort_request(abort_all=True)
    async with drained(manager, "a weight update") as wait_s:
        if not await becomes_idle(manager, wait_s):
            return (
                "requests hold KV of the old weights, in the prefix cache too; abort them or let"
                " them finish, or pass flush_cache=false"
            )
    return None


def _warn_of_old_prefixes(state: ServerState, request: Any) -> None:
    if not request.flush_cache and not state.warned_of_old_prefixes:
        state.warned_of_old_prefixes = True
        logger.warning(
            "weights are updated with flush_cache=false: later requests take KV of the old weights"
            " out of the prefix cache unless /flush_cache empties it before they come"
        )


def _tags(request: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    tags = set(request.tags or GPU_MEMORY_ALL_TYPES)
    if unknown := tags - set(GPU_MEMORY_ALL_TYPES):
        raise ControlError(
            f"tags={sorted(unknown)}: expected some of {_listed(set(GPU_MEMORY_ALL_TYPES))}"
        )
    return tags


def _listed(tags: set[str]) -> str:
    return ", ".join(sorted(tags))
