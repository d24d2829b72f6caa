"""A warning of prefixes of old weights comes only where requests would take some."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin.launcher import control_guards, request_hooks
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.state import ServerState
from sparrow_sglang.schedules.schedule import BudgetSchedule


class Server:
    """A TokenizerManager's calls, as SGLang's hooks would wrap them."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(dp_size=1)
        self.sparrow = ServerState(*[BudgetSchedule.fixed(64, 16)] * 2, mode=Mode())

    def ask(self) -> None:
        tokenized = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))
        request_hooks.check_request(tokenized, self, SimpleNamespace())

    def flush(self) -> None:
        async def call(manager: Any, timeout_s: Any) -> Any:
            return SimpleNamespace(success=True)

        asyncio.run(control_guards.flush_cache(call, self))

    def update(self, success: bool = True) -> None:
        self._call(control_guards.update_weights, success, flush_cache=False)

    def half_an_update(self) -> None:
        """SGLang updates weights, fails to empty the cache and answers with a failure."""
        self.update(success=False)

    def session(self) -> None:
        """Weights come by RDMA, without a call."""
        self._call(control_guards.begin_weight_update)
        self._call(control_guards.end_weight_update)

    def reset(self) -> None:
        self._call(control_guards.check_weights, action="reset_tensors")

    def checksum(self) -> None:
        self._call(control_guards.check_weights, action="checksum")

    def _call(self, hook: Any, success: bool = True, **fields: Any) -> None:
        async def call(manager: Any, request: Any) -> Any:
            return success, ""

        asyncio.run(hook(call, self, SimpleNamespace(**fields)))


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        (("ask", "update", "ask"), True),
        (("ask", "flush", "ask", "update", "ask"), True),
        # Our trainer empties the cache before it sends weights, others do afterwards.
        (("ask", "flush", "update", "update", "ask"), False),
        (("ask", "update", "update", "flush", "ask"), False),
        (("update", "ask"), False),
        (("ask", "half_an_update", "ask"), True),
        (("ask", "session", "ask"), True),
        (("ask", "reset", "ask"), True),
        (("ask", "checksum", "ask"), False),
    ],
)
def test_a_warning_where_requests_take_prefixes_of_old_weights(
    steps: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    with caplog.at_level(logging.WARNING, "sparrow_sglang"):
        for step in steps:
            assert not caplog.records
            getattr(server, step)()
    assert ("call /flush_cache after an update" in caplog.text) == warned


def test_each_update_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    with caplog.at_level(logging.WARNING, "sparrow_sglang"):
        for _ in range(2):
            server.ask()
            server.update()
            server.ask()
            server.ask()
    # caplog sees a record twice where the logger also propagates.
    assert len(set(map(id, caplog.records))) == 2
