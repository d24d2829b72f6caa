"""The lengths that decode densely: measured once, not over released memory."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin.launcher import control
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.state import ServerState
from sparrow_sglang.schedules.schedule import BudgetSchedule

FIXED = BudgetSchedule.fixed(64)


class Ranks:
    """Two data-parallel replicas, which measure as long as `busy` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = ServerState(FIXED, FIXED, measures_dense=True, mode=Mode())
        self.manager: Any = SimpleNamespace(sparrow=self.state)
        self.busy = asyncio.Event()
        self.measured = 0
        monkeypatch.setattr(control, "call_schedulers", self._call)

    async def _call(self, manager: Any, call: str, fields: dict[str, Any]) -> dict[str, Any]:
        if call != "measure":
            return dict.fromkeys(("dp rank 0", "dp rank 1"), fields)
        self.measured += 1
        await self.busy.wait()
        return {"dp rank 0": {"tokens": 128}, "dp rank 1": {"tokens": 256}}


def test_a_request_that_leaves_does_not_end_the_measurement_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> Ranks:
        ranks = Ranks(monkeypatch)
        first, second = (
            asyncio.ensure_future(control.measure_once(ranks.manager)) for _ in range(2)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        ranks.busy.set()
        await second
        assert first.cancelled()
        return ranks

    ranks = asyncio.run(run())
    assert ranks.measured == 1
    # Dense where one of the replicas is slower.
    assert ranks.state.dense_tokens == 256
    assert ranks.state.schedule == FIXED.dense_below(256)


def test_nothing_is_measured_while_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        ranks = Ranks(monkeypatch)
        ranks.busy.set()
        ranks.state.released = {"kv_cache"}
        await control.measure_once(ranks.manager)
        assert not ranks.measured
        ranks.state.released = set()
        await control.measure_once(ranks.manager)
        assert ranks.measured == 1

    asyncio.run(run())
