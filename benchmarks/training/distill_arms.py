"""Adapters that are trained on the sparse actor's own responses, and the tails that they reach.

In: an engine, prompts to train on and held-out ones, two schedules. Out: a row for each step, and
tails of the acceptance rate before and after. The base model stays frozen, and there is no
reinforcement learning.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sparrow_sglang.benchmarks.training.adapter_delivery import Learner
from sparrow_sglang.benchmarks.training.distill_result import GIVEN, Tails
from sparrow_sglang.mismatch.tail import TailStatistics
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.schedule import BudgetSchedule


@dataclass
class Rig:
    """What all arms share: `schedules` by GIVEN and AGGRESSIVE, prompts, and the tails' bins.

    The engine has been started with the given schedule.
    """

    engine: LocalEngine
    model_path: str
    schedules: dict[str, BudgetSchedule]
    training: list[Prompt]
    heldout: list[Prompt]
    new_tokens: int
    bin_tokens: int
    _in_force: str = GIVEN

    def new_learner(self, lr: float) -> Learner:
        """The model with a new adapter, whose initial output is zero."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = DensePolicy.load(ModelConfig(path=self.model_path), OptimizerConfig(), device)
        return Learner(policy, SparseAdapter(policy, DistillConfig(enabled=True, lr=lr)))

    def deliver(self, learner: Learner) -> None:
        """Have the engine sample with the adapter, merged into its weights."""
        self.engine.update_weights(learner.adapter.merged_weights(), "merged")

    def roll_out(self, prompts: Sequence[Prompt], under: str) -> list[TokenSequence]:
        """One fresh response to each prompt, under one of the schedules."""
        if under != self._in_force:
            self.engine.set_schedule(self.schedules[under])
            self._in_force = under
        groups = self.engine.generate(prompts, 1, Sampling(self.new_tokens))
        return [(one.prompt_ids, one.response_ids) for group in groups for one in group.rollouts]

    def tails(self, learner: Learner) -> Tails:
        """Tails of each schedule's own fresh responses to the held-out prompts.

        Only tokens of sparse steps count, each at the number of tokens cached in its step; all
        other tokens agree by construction.
        """
        self.deliver(learner)
        found = {}
        for name, schedule in self.schedules.items():
            sequences = self.roll_out(self.heldout, name)
            rates = learner.policy.acceptance(sequences, schedule, learner.adapter.enabled)
            counted = TailStatistics(self.bin_tokens)
            for prompt, (prompt_ids, _), alpha in zip(self.heldout, sequences, rates, strict=True):
                cached = len(prompt_ids) + np.arange(len(alpha))
                sparse = schedule.tokens_read(cached) < cached
                # The first token comes out of prefill.
                sparse[0] = False
                counted.add(prompt.id, cached[sparse] // self.bin_tokens, alpha[sparse])
            found[name] = [asdict(row) for row in counted.bins()]
        return found


def run_arm(
    rig: Rig, learner: Learner, under: str, measured_at: Sequence[int], steps_per_rollout: int
) -> dict[str, Any]:
    """Train an adapter under one of the schedules; measure tails after each step of `measured_at`.

    The training prompts are divided evenly among the steps, one response each. Responses are rolled
    out for `steps_per_rollout` steps at a time, with the adapter as it is at that time.
    """
    schedule, steps = rig.schedules[under], max(measured_at)
    size = len(rig.training) // steps
    rows: list[dict[str, Any]] = []
    tails: list[dict[str, Any]] = []
    ready: list[TokenSequence] = []
    tokens = 0
    for step in range(steps):
        start = time.perf_counter()
        if not ready:
            rig.deliver(learner)
            end = min(step + steps_per_rollout, steps)
            ready = rig.roll_out(rig.training[step * size : end * size], under)
        rolled_out = time.perf_counter()
        batch, ready = ready[:size], ready[size:]
        metrics = learner.adapter.step(batch, schedule)
        tokens += sum(len(response) for _, response in batch)
        rows.append(
            {
                "step": step + 1,
                "responses": (step + 1) * size,
                "tokens": tokens,
                "kl": metrics["sparrow/distill_kl"],
                "grad_norm": metrics["sparrow/distill_grad_norm"],
                "rollout_s": rolled_out - start,
                "step_s": time.perf_counter() - rolled_out,
            }
        )
        print(f"  step {step + 1} of {steps}: {rows[-1]}", flush=True)
        if step + 1 in measured_at:
            tails.append({"after": rows[-1]} | rig.tails(learner))
    return {"trained_under": schedule.name, "steps": rows, "tails": tails}
