"""Scheduler processes of tests: what a round of lossless decoding drafts there is what a test
chooses, and does not depend on the speed of this machine."""

import itertools
from collections.abc import Sequence
from typing import Any

import landmark_check  # noqa: F401

from sparrow_sglang.planning.rounds import DENSE, Plan
from sparrow_sglang.plugin.lossless.choice import RoundChoice

VARIED = (DENSE, (1, 0, 5), (4, 0, 5), DENSE, DENSE, (3, 0, 5))
"""Plans of rounds that draft up to four tokens."""


def run_scheduler(*arguments: Any, rounds: Sequence[Any] = (), **named: Any) -> Any:
    """SGLang's scheduler process. A spawned one, as on a GPU, imports this module first."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    choose_rounds(rounds)
    return run_scheduler_process(*arguments, **named)


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
