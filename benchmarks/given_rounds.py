"""Engines whose rounds draft a given number of tokens, or accept drafts at a given rate, which
random weights do not give. With a given rate answers are wrong, and take as long."""

from functools import partial
from typing import Any

import torch
from sglang.srt.entrypoints import engine
from sglang.srt.managers.scheduler import run_scheduler_process

from sparrow_sglang.plugin.lossless import worker
from sparrow_sglang.plugin.lossless.choice import RoundChoice
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome, Plan


class Longest(RoundChoice):
    """Rounds draft as many tokens as they may, whatever that takes."""

    def next_round(self, batch: int, length: float) -> Plan:
        return self.plans[-1]


def engine_class(rate: float | None, always_draft: bool) -> type[engine.Engine]:
    """The class of engines that accept each draft with probability `rate`, None for a chance by
    their weights, and draft in each round if they are to draft always."""

    class Engine(engine.Engine):
        run_scheduler_process_func = staticmethod(partial(_run_scheduler, rate, always_draft))

    return Engine


def _run_scheduler(rate: float | None, always_draft: bool, *arguments: Any, **named: Any) -> Any:
    class Worker(worker.LosslessWorker):
        def _accept(self, drafts: Drafts, logits: torch.Tensor) -> Outcome:
            outcome = super()._accept(drafts, logits)
            if rate is None:
                return outcome
            chance = torch.rand(len(outcome.bonus), len(drafts.tokens) - 1, device=logits.device)
            return outcome._replace(accepted=(chance < rate).long().cumprod(1).sum(1))

    if always_draft:
        worker.RoundChoice = Longest  # type: ignore[misc]
    worker.LosslessWorker = Worker  # type: ignore[misc]
    return run_scheduler_process(*arguments, **named)
