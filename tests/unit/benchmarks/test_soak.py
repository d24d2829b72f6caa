"""The soak's checks beside its load, without a server."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparrow_sglang.benchmarks.processes import Server
from sparrow_sglang.benchmarks.rollouts import soak
from sparrow_sglang.benchmarks.rollouts.soak import Soaked


@pytest.mark.parametrize("fails", [False, True])
def test_checks_that_end_early_are_a_problem(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    checked = asyncio.Event()

    def resident_mib(server: Server) -> float:
        checked.set()
        if fails:
            raise OSError("cannot be read")
        return 1.0

    class Load:
        def __init__(self) -> None:
            self.problems: list[str] = []

        async def run(self, clients: int, seconds: float) -> None:
            await checked.wait()
            # Let the check end.
            await asyncio.sleep(0)

    monkeypatch.setattr(soak, "resident_mib", resident_mib)
    process = cast(Any, SimpleNamespace(pid=0))
    server = Server(process, "http://127.0.0.1:1", Path("log"))
    one = Soaked(server, cast(Any, Load()), sparse=False, seed=0)
    asyncio.run(one.run(1, 1.0, 0.001))
    expected = ["checks ended early: OSError cannot be read"] if fails else []
    assert one.load.problems == expected
