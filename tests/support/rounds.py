"""Scheduler processes of tests: what a round of lossless decoding drafts there is what a test
chooses, and does not depend on the speed of this machine."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import landmark_check  # noqa: F401
import torch

from sparrow_sglang.planning.rounds import DENSE, Plan
from sparrow_sglang.plugin.lossless.choice import RoundChoice

VARIED = (DENSE, (1, 0, 5), (4, 0, 5), DENSE, DENSE, (3, 0, 5))
"""Plans of rounds that draft up to four tokens."""


def run_scheduler(*arguments: Any, rounds: Sequence[Any] = (), **named: Any) -> Any:
    """SGLang's scheduler process. A spawned one, as on a GPU, imports this module first."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    choose_rounds(rounds)
    return run_scheduler_process(*arguments, **named)


def run_recorded(*arguments: Any, **named: Any) -> Any:
    """As `run_scheduler`, for one model on several ranks: each draws random numbers of its own in a
    round, and `save_rounds` of its scheduler writes what rounds verified and accepted."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_parallel

    from sparrow_sglang.plugin.lossless import worker

    run_round, rounds = worker.run_round, []

    def recorded(
        passes: Any, histories: Any, requests: Any, plan: Plan, accept: Any, before: Any = None
    ) -> Any:
        verified = []

        def accept_recorded(drafts: Any, logits: torch.Tensor) -> Any:
            verified.append(drafts.tokens[: 1 + plan.drafts + plan.lookups].clone())
            return accept(drafts, logits)

        rank, state = get_parallel().tp_rank, random.getstate()
        # Prefill samples with SGLang's numbers, which ranks have in common.
        with torch.random.fork_rng(devices=[]):
            for generator in (random.seed, torch.default_generator.manual_seed):
                generator(1000 * len(rounds) + rank)
            result = run_round(passes, histories, requests, plan, accept_recorded, before)
        random.setstate(state)
        rounds.append((tuple(plan), *verified, *(part.clone() for part in result.outcome)))
        return result

    def save_rounds(scheduler: Any, folder: str) -> None:
        on_host = [(plan, *(part.cpu() for part in parts)) for plan, *parts in rounds]
        torch.save(on_host, Path(folder) / f"rank-{get_parallel().tp_rank}.pt")

    worker.run_round = recorded
    Scheduler.save_rounds = save_rounds  # type: ignore[attr-defined]
    return run_scheduler(*arguments, **named)


def rounds_of_ranks(engine: Any, folder: Path) -> list[list[Any]]:
    """For each rank of an idle engine that runs `run_recorded`, the plan of each round, the latest
    token and the drafts [1 + n, B], how many were accepted, and the tokens after them, [B]."""
    engine.collective_rpc("save_rounds", folder=str(folder))
    return [torch.load(path) for path in sorted(folder.glob("rank-*.pt"))]


def choose_rounds(rounds: Sequence[Any] = ()) -> None:
    """Have this process take `rounds`, the plans of one round each, in turn. Without any, until the
    worker has timed them, all kinds take turns: those with most sparse drafts, with half of them
    and tokens looked up behind, and with the latter alone."""
    timed, turns = RoundChoice.next_round, itertools.count()

    def next_round(self: RoundChoice, *load: Any) -> Any:
        if self.times is not None and not rounds:
            return timed(self, *load)
        *_, widest = self.plans
        most, rows = widest.drafts, widest.rows
        kinds = (
            (most, 0, rows),
            (most // 2, most - most // 2, rows),
            (0, min(3, most), min(4, rows)),
        )
        looks_up = any(plan.lookups for plan in self.plans)
        plans = rounds or (kinds if looks_up else kinds[:1])
        return Plan._make(plans[next(turns) % len(plans)])

    RoundChoice.next_round = next_round  # type: ignore[method-assign]


def accepted_of(answer: Any) -> list[int]:
    """Rounds of an answer by how many of their drafts were accepted."""
    histogram: list[int] = answer["meta_info"]["spec_correct_drafts_histogram"]
    return histogram


def require_varied(answer: Any) -> None:
    """Half of the rounds of each turn of VARIED draft nothing; of the others some drafts were
    accepted."""
    none, *some = accepted_of(answer)
    assert none >= (none + sum(some)) // len(VARIED) * 3 and sum(some)
