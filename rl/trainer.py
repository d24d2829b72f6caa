"""GRPO from sparse rollouts: the loop.

One step: sync the weights, roll out sparsely, reward, group-relative advantages, dense log-probs,
corrected and clipped loss, optimizer step, metrics. Each stage is documented in the module that
implements it.
"""

from dataclasses import asdict
from pathlib import Path

from sparrow_sglang.rl.advantages import group_advantages
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.collect import collect
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.correction import Correction, correct
from sparrow_sglang.rl.evaluation import evaluate
from sparrow_sglang.rl.learner import Scored
from sparrow_sglang.rl.metrics import (
    acceptance_metrics,
    kv_metrics,
    prefill_metrics,
    rollout_metrics,
)
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.runs.response_rows import measured_tails, response_rows
from sparrow_sglang.rl.runs.run import Run, newest_checkpoint, open_run
from sparrow_sglang.rl.runs.setup import prepare
from sparrow_sglang.rl.tasks.rewards import part_metrics

MAX_SKIPPED_STEPS = 5
"""The run ends once the gradients of this many optimizer steps in a row were not finite."""


def train(config: TrainConfig, resume: bool = False) -> Path | None:
    """Train until `config.steps` steps are done; returns the folder of the last checkpoint.

    `resume` goes on from the newest checkpoint in `config.run_dir`, if there is one. SIGTERM and
    Ctrl-C write a checkpoint and end the process by `Stopped`, a `SystemExit`. Any error outside an
    optimizer step is raised after a checkpoint, too. Must be called in the main thread; a script
    that calls it needs the usual `if __name__ == "__main__"`.

    Raises:
        InputError, ScheduleError, ModelError: something asked for is not there,
            wrong, or at odds with the run in `run_dir`; nothing has been lost then.
        EngineDied, RolloutError: the rollouts of a step cannot be completed.
        FloatingPointError: the gradients of `MAX_SKIPPED_STEPS` optimizer steps in a row were not
            finite. A single such step is skipped.
    """
    with open_run(config, prepare(config), resume) as run:
        for step in range(run.progress.steps_taken, config.steps):
            train_step(run, step)
            if _is_due(run.progress.steps_taken, config.checkpoint.every_steps):
                run.save()
        if config.evaluation.every_steps:
            run.log.write(run.progress.steps_taken, evaluate(run))
    return newest_checkpoint(config.run_dir)


def train_step(run: Run, step: int) -> None:
    """Take training step number `step`: roll out with the current weights, then update them."""
    config, actor, learner = run.config, run.actor, run.learner
    clock = run.log.clock(step)
    evaluated: dict[str, float] = {}
    if _is_due(step, config.evaluation.every_steps):
        with clock("evaluation"):
            evaluated = evaluate(run)
    with clock("sync"):
        actor.load(str(run.progress.steps_taken))
    collected = collect(run, step, clock)
    groups, rewards = collected.groups, collected.rewards
    advantages = group_advantages(rewards, config.algorithm.std_normalisation)
    batch = Batch.of(groups, advantages)
    if config.rollout.truncated == "mask":
        batch = batch.masking_truncated()

    with clock("logprobs"):
        scored = learner.score(batch)
    on_policy = config.algorithm.old_logprobs == "update"
    correction = None if on_policy else _correct(batch, scored, config)
    reference = None
    # Both passes change the weights in place and restore them, which a signal must not cut short.
    if config.algorithm.kl_coefficient:
        with clock("reference"), run.termination.held_back():
            reference = learner.reference_logprobs(batch)
    read = kv_metrics(batch.rollouts, actor.ladder.schedules) | prefill_metrics(batch.rollouts)
    with clock("mismatch"), run.termination.held_back():
        rates, positions = learner.acceptance(batch, actor.schedule)
    lr = learning_rate(config.optimizer, step, config.steps)
    tails = measured_tails(batch, rates, config.mismatch.sequences)
    count = config.logging.response_groups
    shown = response_rows(groups, rewards, collected.parts, tails, count)
    with run.progress.updating(step, collected.replaced, collected.carried):
        with clock("update"):
            weights = None if correction is None else correction.weights
            updated = learner.update(batch, scored, weights, reference, lr)
        scored, metrics = updated.scored, updated.metrics
        correction = correction or _correct(batch, scored, config)
        move = actor.ladder.observe(rates, positions)
        if move is not None:
            run.log.event(step, move.line(), asdict(move))
        if config.distill.enabled:
            with clock("distill"):
                metrics |= learner.distill(batch, actor.schedule)
        run.log.keep_responses(step, shown)
        run.report(
            step,
            rollout_metrics(groups, rewards)
            | part_metrics(collected.parts)
            | collected.metrics
            | advantages.metrics()
            | correction.metrics
            | (acceptance_metrics(rates, positions) if rates.size else {})
            | read
            | {"actor/entropy": float(scored.entropies.double().mean())}
            | metrics
            | {"actor/lr": lr}
            | evaluated
            | clock.metrics(collected.tokens),
        )
    # After the step, so that the checkpoint that is written on an error matches the metrics.
    _require_finite_gradients(updated.skipped_in_a_row)


def _correct(batch: Batch, scored: Scored, config: TrainConfig) -> Correction:
    return correct(scored.logprobs, batch.rollout_logprobs, batch.lengths, config.algorithm)


def _require_finite_gradients(skipped: int) -> None:
    if skipped >= MAX_SKIPPED_STEPS:
        raise FloatingPointError(
            f"the gradients of {skipped} optimizer steps in a row were not finite:"
            " none of these steps was taken; look for rewards that are not finite, or lower"
            " optimizer.lr"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
