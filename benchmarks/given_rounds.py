"""Engines whose rounds draft what they are given, or accept drafts at given rates, which random
weights do not give; their rounds are counted. With given rates answers are wrong, and take as
long."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints import engine
from sglang.srt.managers import scheduler
from sglang.srt.runtime_context import get_parallel

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.planning.rounds import Plan, widths
from sparrow_sglang.planning.step_time import Acceptance
from sparrow_sglang.plugin.lossless import worker
from sparrow_sglang.plugin.lossless.choice import RoundChoice
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome

Counts = dict[str, Counter[str]]
"""By kind of round: `rounds` of requests, their `tokens`, `drafts` and `lookups` whose predecessors
were all accepted, and `accepted_drafts` and `accepted_lookups` of them."""


def engine_class(acceptance: Acceptance | None) -> type[engine.Engine]:
    """Of engines that accept drafts at these rates; None: by the weights."""

    class Engine(engine.Engine):
        run_scheduler_process_func = staticmethod(partial(_run_scheduler, acceptance))

    return Engine


def set_round(target: engine.Engine, plan: Plan) -> None:
    """Have each round of an engine of `engine_class` draft that, from now on."""
    target.collective_rpc("set_given_round", **plan._asdict())


def take_counts(target: engine.Engine) -> dict[str, Any]:
    """`measured_rounds` of an engine of `engine_class` since the last call."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counts.json")
        target.collective_rpc("write_round_counts", path=str(file))
        return measured_rounds(json.loads(file.read_text()))


def measured_rounds(counts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """What a row records of `Counts`: tokens of a round by kind, and the shares accepted, None
    where nothing was drafted."""
    total = sum(map(Counter, counts.values()), Counter[str]())

    def share(name: str) -> float | None:
        return total[f"accepted_{name}"] / total[name] if total[name] else None

    kinds = {
        kind: {**row, "tokens_per_round": row["tokens"] / row["rounds"]}
        for kind, row in sorted(counts.items())
        if row["rounds"]
    }
    rates = {"acceptance_rate": share("drafts"), "lookup_acceptance": share("lookups")}
    return {"rounds": kinds, **rates}


def counting_choice(counts: Counts, given: list[Plan]) -> type[RoundChoice]:
    """Of choices that count rounds, and choose the last one `given`, if there is one."""

    class Choice(RoundChoice):
        def next_round(self, *load: Any) -> Plan:
            if not given:
                return super().next_round(*load)
            plan = given[-1]
            rows = min(rows for rows in widths(self.plans[-1].rows) if rows >= plan.rows)
            return plan._replace(rows=rows)

        def observe(self, plan: Plan, accepted: Sequence[int]) -> list[tuple[int, int]]:
            drafts, lookups = totals = super().observe(plan, accepted)
            row = counts.setdefault(plan.kind, Counter())
            row.update(rounds=len(accepted), tokens=len(accepted) + int(sum(accepted)))
            row.update(drafts=drafts[0], accepted_drafts=drafts[1])
            row.update(lookups=lookups[0], accepted_lookups=lookups[1])
            return totals

    return Choice


def accepted_at(rates: Acceptance, plan: Plan, batch: int, device: Any) -> torch.Tensor:
    """[batch] accepted drafts of a round, by chance."""
    position = torch.arange(plan.drafts + plan.lookups, device=device)
    # On the device, as a copy from the host would wait for it.
    chances = torch.full_like(position, rates.drafts, dtype=torch.float32)
    chances.masked_fill_(position >= plan.drafts, rates.lookups)
    hits = torch.rand(batch, len(position), device=device) < chances
    return hits.long().cumprod(1).sum(1)


def _run_scheduler(acceptance: Acceptance | None, *arguments: Any, **named: Any) -> Any:
    counts: Counts = {}
    given: list[Plan] = []

    class Worker(worker.LosslessWorker):
        def _accept(self, drafts: Drafts, logits: torch.Tensor) -> Outcome:
            outcome = super()._accept(drafts, logits)
            if acceptance is None:
                return outcome
            batch = len(outcome.bonus)
            return outcome._replace(
                accepted=accepted_at(acceptance, drafts.plan, batch, logits.device)
            )

    def set_given_round(self: Any, **plan: int) -> None:
        given.append(Plan(**plan))

    def write_round_counts(self: Any, path: str) -> None:
        if get_parallel().tp_rank == 0:
            write_json(Path(path), counts)
        counts.clear()

    scheduler.Scheduler.set_given_round = set_given_round
    scheduler.Scheduler.write_round_counts = write_round_counts
    worker.RoundChoice = counting_choice(counts, given)  # type: ignore[misc]
    worker.LosslessWorker = Worker  # type: ignore[misc]
    return scheduler.run_scheduler_process(*arguments, **named)
