"""Engines whose rounds accept drafts at a given rate, which random weights do not give. Answers are
wrong, and take as long."""

from functools import partial
from typing import Any

import sglang
import torch
from sglang.srt.managers.scheduler import run_scheduler_process

from sparrow_sglang.plugin.lossless import worker
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome


def engine_class(rate: float) -> type[sglang.Engine]:
    """The class of engines that accept each draft with probability `rate`."""

    class Engine(sglang.Engine):
        run_scheduler_process_func = staticmethod(partial(_run_scheduler, rate))

    return Engine


def _run_scheduler(rate: float, *arguments: Any, **named: Any) -> Any:
    class Worker(worker.LosslessWorker):
        def _verify(self, drafts: Drafts, logits: torch.Tensor) -> Outcome:
            outcome = super()._verify(drafts, logits)
            chance = torch.rand(len(outcome.bonus), drafts.count, device=logits.device)
            return outcome._replace(accepted=(chance < rate).long().cumprod(1).sum(1))

    worker.LosslessWorker = Worker  # type: ignore[misc]
    return run_scheduler_process(*arguments, **named)
