"""A client that leaves aborts the request of its id, wherever requests of longer ids are."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.scheduler.scheduler_hooks import abort_one
from sparrow_sglang.plugin.state import PROCESS, SchedulerState

BATCHES = ("running_batch", "cur_batch", "last_batch")


@dataclass(eq=False)
class Req:
    rid: str


def place(scheduler: Any, where: str, reqs: list[Any]) -> None:
    """Put requests where SGLang keeps them."""
    if where in BATCHES:
        setattr(scheduler, where, SimpleNamespace(reqs=reqs))
    elif where.endswith("mbs"):
        setattr(scheduler, where, [None, SimpleNamespace(reqs=reqs)])
    elif where == "grammar_queue":
        scheduler.grammar_manager = SimpleNamespace(grammar_queue=reqs)
    elif where == "chunked_req":
        [scheduler.chunked_req] = reqs
    else:
        setattr(scheduler, where, reqs)


@pytest.mark.parametrize(
    "where",
    [*BATCHES, "running_mbs", "mbs", "last_mbs", "waiting_queue", "grammar_queue", "chunked_req"],
)
def test_a_longer_id_is_another_request(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    budgets: Any = None
    monkeypatch.setattr(PROCESS, "scheduler", SchedulerState(budgets, mode=Mode()))
    own, other = Req("a"), Req("a1")
    scheduler: Any = SimpleNamespace(waiting_queue=[])
    place(scheduler, where, [other])
    place(scheduler, "cur_batch" if where != "cur_batch" else "last_batch", [own])
    aborted: list[Req] = []

    def abort(scheduler: Any, message: Any) -> None:
        """As SGLang: all whose ids begin with this one."""
        aborted.extend(each for each in (own, other) if each.rid.startswith(message.rid))

    abort_one(abort, scheduler, SimpleNamespace(rid="a", abort_all=False))  # type: ignore[arg-type]
    assert aborted == [own] and (own.rid, other.rid) == ("a", "a1")
    aborted.clear()
    abort_one(abort, scheduler, SimpleNamespace(rid="", abort_all=True))  # type: ignore[arg-type]
    assert aborted == [own, other]
