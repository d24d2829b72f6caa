"""A switch of schedules waits until every replica is idle."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin.scheduler_calls import ControlError, idle


@pytest.mark.parametrize("flushed", [(True, False), (False, True), (True, True)])
def test_whichever_replica_answers_first_all_must_be_idle(flushed: tuple[bool, bool]) -> None:
    """SGLang's own call returns the answer of the first replica, which may be an idle one."""

    class Manager:
        is_pause = True
        is_pause_cond = asyncio.Condition()

        def auto_create_handle_loop(self) -> None: ...

        async def flush_cache_communicator(self, request: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(success=success) for success in flushed]

        async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
            return (await self.flush_cache_communicator(None))[0]

    async def entered() -> bool:
        manager: Any = Manager()
        async with idle(manager, "a switch"):
            return True

    if all(flushed):
        assert asyncio.run(entered())
    else:
        with pytest.raises(ControlError, match="a switch was given up: generation is paused"):
            asyncio.run(entered())
