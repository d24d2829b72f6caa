"""Scheduler processes of tests: what a round of lossless decoding drafts there is what a test
chooses, and does not depend on the speed of this machine."""

import itertools
from collections.abc import Sequence
from typing import Any

import landmark_check  # noqa: F401

from sparrow_sglang.plugin.lossless.draft_length import DraftLength


def run_scheduler(*arguments: Any, rounds: Sequence[Any] = (), **named: Any) -> Any:
    """SGLang's scheduler process. A spawned one, as on a GPU, imports this module first."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    choose_rounds(rounds)
    return run_scheduler_process(*arguments, **named)


def choose_rounds(rounds: Sequence[Any] = ()) -> None:
    """Have this process take `rounds`, the plans of one round each, in turn. Without any, rounds
    draft as many tokens as they may until the worker has timed them."""
    plans, timed = itertools.cycle(rounds), DraftLength.next_round

    def next_round(self: DraftLength, *load: Any) -> Any:
        if rounds:
            return next(plans)
        return self.most if self.times is None else timed(self, *load)

    DraftLength.next_round = next_round  # type: ignore[method-assign]
