"""Guards of SGLang's control calls: one that would end the scheduler is rejected with a reason.
SGLang asserts in the scheduler that it is idle, or that memory has been released, and a failed
assertion ends it, and with it all requests. During these calls no score of the audit runs."""

import functools
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import Any

from sparrow_sglang.plugin.scheduler.weight_checks import CHECK_FOLDER, PARTIAL, REFUSED
from sparrow_sglang.plugin.scheduler_calls import (
    ControlError,
    call_schedulers,
    flush,
    is_idle,
    requests_blocked,
)
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.plugin.state import ServerState, server_state
from sparrow_sglang.sglang_compat.versions import weight_update_session

Call = Callable[..., Coroutine[Any, Any, Any]]


def _hook(guard: Call) -> Call:
    """AROUND hook of a method of the TokenizerManager; does nothing with another backend. `guard`
    receives the bound call, the manager, our state and the request."""

    @functools.wraps(guard)
    async def hook(call: Call, manager: Any, *args: Any, **kwargs: Any) -> Any:
        state, original = server_state(manager), functools.partial(call, manager, *args, **kwargs)
        if state is None:
            return await original()
        return await guard(original, manager, state, args[0] if args else None)

    return hook


@_hook
async def without_scores(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    """A pause may keep the scheduler's requests, and a weight update would wait for a score."""
    async with _without_scores(state):
        return await call()


async def flush_cache(
    call: Call, manager: Any, timeout_s: float | None = None, **kwargs: Any
) -> Any:
    """AROUND hook: SGLang answers what the first rank does, but every rank must have flushed."""
    state = server_state(manager)
    if state is None:
        return await call(manager, timeout_s, **kwargs)
    async with _without_scores(state):
        answer = await call(manager, timeout_s, **kwargs)
        if answer.success and manager.server_args.dp_size > 1:
            try:
                await flush(manager, timeout_s)
            except ControlError as error:
                answer.success, answer.message = False, str(error)
    return answer


@_hook
async def check_weights(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    """SGLang's check may also overwrite the weights."""
    async with _without_scores(state, new_weights=True):
        return await call()


@_hook
async def update_weights(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    """Answer with a failure where the prefix cache could not be emptied afterwards. Older
    schedulers assert that it could; newer ones fail, but serve the new weights."""
    try:
        if "weights" in state.released:
            raise ControlError(
                'their memory is released; call /resume_memory_occupation with tags ["weights"]'
            )
        if hasattr(request, "model_path"):
            await call_schedulers(manager, CHECK_FOLDER, {"path": request.model_path})
        async with _without_scores(state, new_weights=True):
            await _require_no_old_kv(manager, request)
            answer = await call()
    except ControlError as error:
        answer = False, f"{REFUSED}{error}"
        # The answer to an update from disk has one number more.
        return (*answer, 0) if hasattr(request, "model_path") else answer
    _announce_if_partial(answer)
    return answer


async def load_weights(call: Call, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: `update_weights`. From 0.5.21 on SGLang loads tensors only between
    `begin_weight_update` and `end_weight_update`, which trainers for older ones do not call: then
    each call is an update of its own."""

    async def update_of_its_own(*args: Any, **kwargs: Any) -> Any:
        answer = await weight_update_session(manager, "begin")
        if not answer[0]:
            return answer
        assert state is not None
        # It is not one that a trainer ends.
        session, state.weight_update = state.weight_update, None
        async with session or nullcontext():
            try:
                answer = await call(*args, **kwargs)
            finally:
                ended = await weight_update_session(manager, "end")
        return ended if answer[0] and not ended[0] else answer

    state = server_state(manager)
    is_alone = state is not None and state.weight_update is None
    opens = is_alone and hasattr(manager, "begin_weight_update")
    return await update_weights(update_of_its_own if opens else call, manager, *args, **kwargs)


def _announce_if_partial(answer: Any) -> None:
    _, partial, note = answer[1].partition(PARTIAL)
    if partial:
        announce(f"{partial}{note}")


@_hook
async def begin_weight_update(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    """No score runs until `end_weight_update`, as weights change in several calls."""
    async with AsyncExitStack() as session:
        await session.enter_async_context(_without_scores(state, new_weights=True))
        answer = await call()
        if answer[0]:
            state.weight_update = session.pop_all()
    return answer


@_hook
async def end_weight_update(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    answer = await call()
    if answer[0] and state.weight_update is not None:
        session, state.weight_update = state.weight_update, None
        await session.aclose()
        _announce_if_partial(answer)
    return answer


@_hook
async def release_memory(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    """Refuse while requests use the memory; `check_request` refuses them until it is resumed."""
    tags = _tags(request)
    async with _without_scores(state):
        if not manager.is_pause and await manager.model_update_lock.is_locked():
            raise ControlError("memory was not released: requests are running; let them finish")
        async with requests_blocked(manager, "a release of memory") as wait_s:
            if tags & state.released or not await is_idle(manager, wait_s, retracted=True):
                raise ControlError(f"tags={sorted(tags)}: released already, or requests hold KV")
            answer = await call()
            state.released |= tags
    return answer


@_hook
async def resume_memory(call: Call, manager: Any, state: ServerState, request: Any) -> Any:
    tags = _tags(request)
    # A client may retry a call that timed out, and a second resume would end the scheduler.
    async with state.resuming:
        if missing := sorted(tags - state.released):
            released = ", ".join(sorted(state.released)) or "none"
            raise ControlError(f"tags={missing}: expected some of those released: {released}")
        answer = await call()
        state.released -= tags
    return answer


def _without_scores(
    state: ServerState, new_weights: bool = False
) -> AbstractAsyncContextManager[None]:
    return nullcontext() if state.auditor is None else state.auditor.held_back(new_weights)


async def _require_no_old_kv(manager: Any, request: Any) -> None:
    if not request.flush_cache:
        return
    if request.abort_all_requests:
        manager.abort_request(abort_all=True)
    async with requests_blocked(manager, "a weight update") as wait_s:
        if not await is_idle(manager, wait_s, retracted=True):
            raise ControlError(
                "requests hold KV of the old weights; abort them, or pass flush_cache=false"
            )


def _tags(request: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    tags = set(request.tags or GPU_MEMORY_ALL_TYPES)
    if unknown := sorted(tags.difference(GPU_MEMORY_ALL_TYPES)):
        raise ControlError(f"tags={unknown}: expected some of {', '.join(GPU_MEMORY_ALL_TYPES)}")
    return tags
