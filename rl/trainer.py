"""GRPO from sparse rollouts: the loop."""

import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from sparrow_sglang.rl.advantages import Advantages, group_advantages
from sparrow_sglang.rl.batch import Batch, evenly
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.evaluation import evaluate
from sparrow_sglang.rl.learner import TrainersLost, Updated
from sparrow_sglang.rl.loss import correction_metrics
from sparrow_sglang.rl.metrics import (
    Acceptance,
    acceptance_metrics,
    entropy_metrics,
    kv_metrics,
    rollout_metrics,
    round_metrics,
)
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.rollout import EngineDied, EngineNotStarted
from sparrow_sglang.rl.runs.log import Clock, response_rows
from sparrow_sglang.rl.runs.run import Run, newest_checkpoint, open_run
from sparrow_sglang.rl.runs.setup import Setup, check
from sparrow_sglang.rl.tasks.rewards import Scores, part_metrics
from sparrow_sglang.rl.types import Group, Prompt
from sparrow_sglang.run_folder import RESPONSES_FILE

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
"""The run ends once the gradients of this many optimizer steps in a row were not finite."""


def train(config: TrainConfig, resume: bool = False) -> Path | None:
    """Train until `config.steps` steps are done; returns the folder of the last checkpoint.
    `resume` continues from the newest checkpoint in `config.run_dir`, if there is one. SIGTERM and
    Ctrl-C write a checkpoint and raise `Stopped`, a `SystemExit`; a second Ctrl-C stops at once.
    Errors outside an optimizer step are raised after a checkpoint, too. Must be called in the main
    thread, under the usual `if __name__ == "__main__"`.

    Raises:
        InputError, ScheduleError, ModelError: invalid settings, before anything is written.
        EngineNotStarted, RolloutError: no engine, or responses that cannot be trained on.
        EngineDied, TrainersLost: more than `cluster.max_restarts` deaths without a checkpoint.
        RewardsFailed: an unusable reward, or more than half of a step's rewards are missing.
        FloatingPointError: log-probs or weights of the policy, or `MAX_SKIPPED_STEPS` gradients in
            a row, were not finite. The message names the last checkpoint; all are finite.
    """
    setup = check(config)
    connection: AbstractContextManager[None] = nullcontext()
    if config.cluster is not None:
        # Imported here, as only these runs need Ray.
        from sparrow_sglang.rl.cluster.ray_session import connected

        connection = connected(config.cluster)
    with connection:
        failures, newest = 0, newest_checkpoint(config.run_dir)
        while True:
            try:
                _train(config, setup, resume)
                return newest_checkpoint(config.run_dir)
            except (EngineDied, TrainersLost) as error:
                before, newest = newest, newest_checkpoint(config.run_dir)
                failures = failures + 1 if newest == before else 1
                restarts = 0 if config.cluster is None else config.cluster.max_restarts
                if isinstance(error, EngineNotStarted) or failures > restarts:
                    raise
                logger.warning("%s; the run starts again", error)
                resume = True


def _train(config: TrainConfig, setup: Setup, resume: bool) -> None:
    with open_run(config, setup, resume) as run:
        for step in range(run.state.step, config.steps):
            clock = Clock(run.log.progress)
            collected = roll_out(run, step, clock)
            # A signal ends a rollout at once, and waits for an update.
            with run.termination.held_back(f"update of step {step}"):
                train_step(run, step, collected, clock)
            run.save_if_due()
        if config.evaluation.every_steps:
            _evaluate(run)


@dataclass(frozen=True, eq=False)
class Collected:
    """The groups of a step, in the order of its prompts, and their scores."""

    groups: Sequence[Group]
    scores: Scores

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)


def roll_out(run: Run, step: int, clock: Clock) -> Collected:
    """The engine has released its memory afterwards."""
    every = run.config.evaluation.every_steps
    if every and step % every == 0:
        with clock("evaluation"):
            _evaluate(run)
    with clock("sync"):
        run.load_actor()
    return collect(run, clock)


def collect(run: Run, clock: Clock) -> Collected:
    """Groups of the run's next prompts; the engine has released its memory."""
    settings = run.config.rollout
    count = settings.prompts_per_step
    prompts = prompts_from(run.setup.train, run.prompts_used, count, run.config.seed)
    total = count * settings.samples_per_prompt
    groups: dict[int, Group] = {}
    with run.reward_workers.scoring() as scoring:
        with clock("rollout"):
            for position, group in run.log.counted("rollout", total, run.stream(prompts)):
                groups[position] = group
                scoring.add(position, group)
        with clock("reward"):
            scores = scoring.scores()
    return Collected([groups[position] for position in range(count)], scores)


def prompts_from(prompts: Sequence[Prompt], first: int, count: int, seed: int) -> list[Prompt]:
    """`count` prompts from the run's prompt number `first` on: all once before any again, each time
    in a new order that depends on `seed` only."""
    size = len(prompts)
    numbers = range(first, first + count)
    return [prompts[_order(size, seed, number // size)[number % size]] for number in numbers]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def train_step(run: Run, step: int, collected: Collected, clock: Clock) -> None:
    config, learner, schedule = run.config, run.learner, run.setup.schedule
    rewards = collected.scores.rewards
    advantages = group_advantages(rewards, config.algorithm.std_normalisation)
    batch = Batch.of(collected.groups, advantages)
    with clock("logprobs"):
        scored = learner.score(batch)
    _require_finite(batch, scored.logprobs, step)
    with clock("mismatch"):
        acceptance = learner.acceptance(batch, schedule)
    lr = learning_rate(config.optimizer, step, config.steps)
    with run.updating(), clock("update"):
        updated = learner.update(batch, scored, lr)
    # The optimizer has skipped the step if one of these is not finite: the state is still whole.
    _require_finite(batch, updated.scored.logprobs, step)
    with run.updating(), clock("distill"):
        distilled = learner.distill(batch, schedule)

    run.state.step += 1
    run.state.tokens += collected.tokens
    metrics = _metrics(run, collected, batch, advantages, acceptance, updated)
    _log_responses(run, step, collected, acceptance.tails() if acceptance else {})
    run.log.write(step, metrics | distilled | clock.metrics(collected.tokens))
    # After the step, so that the checkpoint that is written on an error matches the metrics.
    if updated.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise FloatingPointError(
            f"the gradients of {updated.skipped_in_a_row} optimizer steps in a row were not finite;"
            " expected a lower optimizer.lr"
        )


def _metrics(
    run: Run,
    collected: Collected,
    batch: Batch,
    advantages: Advantages,
    acceptance: Acceptance | None,
    updated: Updated,
) -> dict[str, float]:
    dense, rollout = updated.scored, batch.rollout_logprobs
    return (
        rollout_metrics(collected.groups, collected.scores.rewards)
        | part_metrics(collected.scores.parts)
        | collected.scores.metrics()
        | {
            "sparrow/response_tokens_seen": float(run.state.tokens),
            "sparrow/epochs": run.prompts_used / len(run.setup.train),
        }
        | advantages.metrics()
        | correction_metrics(dense.logprobs, rollout, batch.lengths, run.config.algorithm)
        | (acceptance_metrics(acceptance.rates, acceptance.bins) if acceptance else {})
        | kv_metrics(batch.rollouts, run.setup.schedule)
        | round_metrics(batch.rollouts)
        | entropy_metrics(rollout, dense.entropies)
        | updated.metrics
    )


def _require_finite(batch: Batch, logprobs: torch.Tensor, step: int) -> None:
    """Raise `FloatingPointError` if any log-prob [N] of the policy is not finite."""
    for rollout, values in zip(batch.rollouts, logprobs.split(batch.lengths), strict=True):
        if wrong := int((~torch.isfinite(values)).sum()):
            raise FloatingPointError(
                f"step {step}, prompt {rollout.prompt_id!r}, sample {rollout.sample}: {wrong} of"
                f" {len(values)} log-probs of the policy are not finite; expected finite weights,"
                " maybe by a lower optimizer.lr from an earlier checkpoint on"
            )


def _evaluate(run: Run) -> None:
    steps, evaluation = run.state.step, evaluate(run)
    for line in evaluation.lines():
        run.log.progress.print_line(f"after {steps} steps: {line}")
    # Before the checkpoint, during which the run may be killed.
    rows = evaluation.rows(run.setup.tokenizer.decode)
    run.log.write_evaluation(steps, evaluation.metrics, rows)
    run.keep_if_best(evaluation.metrics["eval/pass_rate"])


def _log_responses(
    run: Run, step: int, collected: Collected, tails: dict[tuple[str, tuple[int, ...]], float]
) -> None:
    shown = evenly(len(collected.groups), run.config.logging.response_groups)
    scores = collected.scores
    rows = response_rows(
        [collected.groups[index] for index in shown],
        [scores.rewards[index] for index in shown],
        [scores.parts[index] for index in shown] if scores.parts else (),
        run.setup.tokenizer.decode,
        tails,
    )
    run.log.append(RESPONSES_FILE, step, rows)
