"""Control calls on every replica: a flush before an adapter is loaded, a resume of memory."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin.launcher.control_guards import resume_memory
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.scheduler_calls import ControlError, flush
from sparrow_sglang.plugin.state import ServerState
from sparrow_sglang.schedules.schedule import BudgetSchedule


@pytest.mark.parametrize("flushed", [(True, False), (False, True), (True, True)])
def test_whichever_replica_answers_first_all_must_be_emptied(flushed: tuple[bool, bool]) -> None:
    """SGLang's own call returns the answer of the first replica, which may be an idle one."""

    class Manager:
        def auto_create_handle_loop(self) -> None: ...

        async def flush_cache_communicator(self, request: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(success=success) for success in flushed]

        async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
            return (await self.flush_cache_communicator(None))[0]

    manager: Any = Manager()
    if all(flushed):
        asyncio.run(flush(manager))
    else:
        with pytest.raises(ControlError):
            asyncio.run(flush(manager))


def test_memory_is_resumed_once_whoever_repeats_the_call() -> None:
    state = ServerState(*[BudgetSchedule.fixed(64, 16)] * 2, released={"kv_cache"}, mode=Mode())
    calls = []

    async def call(manager: Any, request: Any) -> None:
        calls.append(request)
        await asyncio.sleep(0)

    async def twice() -> list[Any]:
        request = SimpleNamespace(tags=["kv_cache"])
        each = (resume_memory(call, SimpleNamespace(sparrow=state), request) for _ in range(2))
        return await asyncio.gather(*each, return_exceptions=True)

    _, second = asyncio.run(twice())
    assert len(calls) == 1 and isinstance(second, ControlError)
    assert not state.released
