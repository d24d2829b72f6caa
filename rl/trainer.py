"""GRPO from sparse rollouts: the loop."""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from sparrow_sglang.rl.acceptance import acceptance_metrics
from sparrow_sglang.rl.advantages import group_advantages
from sparrow_sglang.rl.batch import Batch, evenly
from sparrow_sglang.rl.collect import Collected, collect, collect_partial
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.correction import correct
from sparrow_sglang.rl.evaluation import evaluate
from sparrow_sglang.rl.learner import TrainersLost
from sparrow_sglang.rl.metrics import (
    entropy_metrics,
    kv_metrics,
    prefill_metrics,
    rollout_metrics,
    round_metrics,
)
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.rollout import EngineDied, EngineNotStarted
from sparrow_sglang.rl.runs.log import Clock, response_rows
from sparrow_sglang.rl.runs.run import Run, newest_checkpoint, open_run
from sparrow_sglang.rl.runs.setup import Setup, prepare
from sparrow_sglang.rl.tasks.rewards import part_metrics
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
        FloatingPointError: log-probs of the policy, or `MAX_SKIPPED_STEPS` gradients in a row, were
            not finite.
    """
    setup = prepare(config)
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
            except EngineNotStarted:
                raise
            except (EngineDied, TrainersLost) as error:
                before, newest = newest, newest_checkpoint(config.run_dir)
                failures = failures + 1 if newest == before else 1
                if config.cluster is None or failures > config.cluster.max_restarts:
                    raise
                start = newest or "the beginning"
                logger.warning("%s; the run starts again from %s", error, start)
                resume = True


def _train(config: TrainConfig, setup: Setup, resume: bool) -> None:
    with open_run(config, setup, resume) as run:
        for step in range(run.state.step, config.steps):
            clock = Clock(run.log.progress)
            collected = roll_out(run, step, clock)
            # A signal ends a rollout at once, and waits for an update.
            with run.termination.held_back(f"update of step {step}"):
                train_step(run, step, collected, clock)
            if _is_due(run.state.step, config.checkpoint.every_steps):
                run.save()
        if config.evaluation.every_steps:
            _evaluate(run)


def roll_out(run: Run, step: int, clock: Clock) -> Collected:
    """The engine has released its memory afterwards."""
    if _is_due(step, run.config.evaluation.every_steps):
        with clock("evaluation"):
            _evaluate(run)
    with clock("sync"):
        run.load_actor()
    if run.config.rollout.oversubscribe > 1:
        return collect_partial(run, run.prompts_used, step, clock)
    return collect(run, run.prompts_used, clock)


def train_step(run: Run, step: int, collected: Collected, clock: Clock) -> None:
    config, learner, schedule = run.config, run.learner, run.setup.schedule
    advantages = group_advantages(collected.rewards, config.algorithm.std_normalisation)
    batch = Batch.of(collected.groups, advantages)
    if config.rollout.truncated == "mask":
        batch = batch.masking_truncated()

    with clock("logprobs"):
        scored = learner.score(batch)
    _require_finite(batch, scored.logprobs, step)
    with clock("reference"):
        reference = learner.reference_logprobs(batch)
    with clock("mismatch"):
        acceptance = learner.acceptance(batch, schedule)
    lr = learning_rate(config.optimizer, step, config.steps)
    with run.updating():
        with clock("update"):
            updated = learner.update(batch, scored, reference, lr)
        _require_finite(batch, updated.scored.logprobs, step)
        with clock("distill"):
            distilled = learner.distill(batch, schedule)
    run.state.advance(collected.tokens, collected.replaced, collected.carried)

    dense, rollout = updated.scored, batch.rollout_logprobs
    correction = correct(dense.logprobs, rollout, batch.lengths, config.algorithm)
    run.state.metrics = (
        rollout_metrics(collected.groups, collected.rewards)
        | part_metrics(collected.parts)
        | collected.metrics
        | {
            "sparrow/response_tokens_seen": float(run.state.tokens),
            "sparrow/epochs": run.prompts_used / len(run.setup.train),
        }
        | advantages.metrics()
        | correction.metrics
        | (acceptance_metrics(acceptance.rates, acceptance.bins) if acceptance else {})
        | kv_metrics(batch.rollouts, schedule)
        | prefill_metrics(batch.rollouts)
        | round_metrics(batch.rollouts)
        | entropy_metrics(rollout, dense.entropies)
        | updated.metrics
        | distilled
        | {"actor/lr": lr}
        | clock.metrics(collected.tokens)
    )
    _log_responses(run, step, collected, acceptance.tails() if acceptance else {})
    run.log.write(step, run.state.metrics)
    # After the step, so that the checkpoint that is written on an error matches the metrics.
    if updated.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise FloatingPointError(
            f"the gradients of {updated.skipped_in_a_row} optimizer steps in a row were not finite;"
            " expected a lower optimizer.lr"
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
    rows = response_rows(
        [collected.groups[index] for index in shown],
        [collected.rewards[index] for index in shown],
        [collected.parts[index] for index in shown] if collected.parts else (),
        run.setup.tokenizer.decode,
        tails,
    )
    run.log.append(RESPONSES_FILE, step, rows)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
