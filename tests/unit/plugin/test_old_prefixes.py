"""A warning of prefixes of old weights comes only where requests would take some."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin import control_guards, request_hooks
from sparrow_sglang.plugin.state import ServerState
from sparrow_sglang.schedule import BudgetSchedule


class Server:
    """A TokenizerManager's calls, as SGLang's hooks would wrap them."""

    def __init__(self) -> None:
        self.sparrow = ServerState(*[BudgetSchedule.fixed(64, 16)] * 2)

    def ask(self) -> None:
        tokenized = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))
        request_hooks.check_request(tokenized, self, SimpleNamespace())

    def flush(self) -> None:
        async def call(manager: Any) -> Any:
            return SimpleNamespace(success=True)

        asyncio.run(control_guards.flush_cache(call, self))

    def update(self, success: bool = True) -> None:
        async def call(manager: Any, request: Any) -> Any:
            return success, ""

        request = SimpleNamespace(flush_cache=False)
        asyncio.run(control_guards.update_weights(call, self, request))


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        (("ask", "update", "ask"), True),
        (("ask", "flush", "ask", "update", "ask"), True),
        # Our trainer empties the cache before it sends weights, others do afterwards.
        (("ask", "flush", "update", "update", "ask"), False),
        (("ask", "update", "update", "flush", "ask"), False),
        (("update", "ask"), False),
    ],
)
def test_a_warning_where_requests_take_prefixes_of_old_weights(
    steps: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    request_hooks._warn_of_old_prefixes.cache_clear()
    server = Server()
    with caplog.at_level(logging.WARNING, "sparrow_sglang"):
        for step in steps:
            assert not caplog.records
            getattr(server, step)()
    assert ("call /flush_cache after an update" in caplog.text) == warned


def test_a_failed_update_leaves_no_old_prefixes(caplog: pytest.LogCaptureFixture) -> None:
    request_hooks._warn_of_old_prefixes.cache_clear()
    server = Server()
    server.ask()
    server.update(success=False)
    server.ask()
    assert not caplog.records
