"""Before an adapter is loaded the prefix cache of every replica is emptied."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin.scheduler_calls import ControlError, flush


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
