"""Engines whose rounds draft what they are given, or accept drafts at given rates, which random
weights do not give; their rounds are counted. With given rates answers are wrong, and take as
long."""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sglang.srt.entrypoints import engine
from sglang.srt.managers import scheduler
from sglang.srt.runtime_context import get_parallel

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.rounds import Rates, Round, RoundCounts, accepted_at
from sparrow_sglang.planning.rounds import Plan, widths
from sparrow_sglang.plugin.lossless import worker
from sparrow_sglang.plugin.lossless.choice import RoundChoice
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome


class Given(NamedTuple):
    """Rates at which drafts are accepted, and what each round drafts. None: by the weights, and
    what pays."""

    rates: Rates | None
    round: Round | None


def engine_class(given: Given) -> type[engine.Engine]:
    class Engine(engine.Engine):
        run_scheduler_process_func = staticmethod(partial(_run_scheduler, given))

    return Engine


def set_round(target: engine.Engine, round_: Round) -> None:
    """Have each round of an engine of `engine_class` draft that, from now on."""
    target.collective_rpc("set_given_round", drafts=round_.drafts, lookups=round_.lookups)


def take_counts(target: engine.Engine) -> dict[str, dict[str, int]]:
    """`RoundCounts` of an engine of `engine_class` since the last call."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counts.json")
        target.collective_rpc("write_round_counts", path=str(file))
        counts: dict[str, dict[str, int]] = json.loads(file.read_text())
    return counts


def _run_scheduler(given: Given, *arguments: Any, **named: Any) -> Any:
    chosen, counts = [given.round], RoundCounts()

    class Choice(RoundChoice):
        def next_round(self, batch: int, length: float) -> Plan:
            if (round_ := chosen[0]) is None:
                return super().next_round(batch, length)
            rows = min(rows for rows in widths(self.plans[-1].rows) if rows > round_.total)
            return Plan(*round_, rows)

        def observe(self, plan: Plan, accepted: Sequence[int]) -> list[tuple[int, int]]:
            counts.add(Round(plan.drafts, plan.lookups), accepted)
            return super().observe(plan, accepted)

    class Worker(worker.LosslessWorker):
        def _accept(self, drafts: Drafts, logits: torch.Tensor) -> Outcome:
            outcome = super()._accept(drafts, logits)
            if given.rates is None:
                return outcome
            round_ = Round(drafts.plan.drafts, drafts.plan.lookups)
            accepted = accepted_at(given.rates, round_, len(outcome.bonus), logits.device)
            return outcome._replace(accepted=accepted)

    def set_given_round(self: Any, drafts: int, lookups: int) -> None:
        chosen[0] = Round(drafts, lookups)

    def write_round_counts(self: Any, path: str) -> None:
        if get_parallel().tp_rank == 0:
            write_json(Path(path), counts.kinds)
        counts.kinds.clear()

    scheduler.Scheduler.set_given_round = set_given_round
    scheduler.Scheduler.write_round_counts = write_round_counts
    worker.RoundChoice = Choice  # type: ignore[misc]
    worker.LosslessWorker = Worker  # type: ignore[misc]
    return scheduler.run_scheduler_process(*arguments, **named)
