"""GRPO from sparse rollouts: the loop.

One step: sync the weights, roll out sparsely, reward, group-relative advantages, dense log-probs,
corrected and clipped loss, optimizer step, metrics. Each stage is documented in the module that
implements it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from sparrow_sglang.rl.advantages import group_advantages
from sparrow_sglang.rl.batch import Batch, sampled_tokens
from sparrow_sglang.rl.collect import collect
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.correction import Correction, correct
from sparrow_sglang.rl.evaluation import evaluate
from sparrow_sglang.rl.loss import MiniBatchLoss, OnPolicyLoss, token_shares
from sparrow_sglang.rl.metrics import (
    acceptance_metrics,
    kv_metrics,
    prefill_metrics,
    rollout_metrics,
)
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.optimizer import learning_rate
from sparrow_sglang.rl.ranks import joined
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
    optimizer step is raised after a checkpoint, too, unless only one of several ranks has it. Must
    be called in the main thread; a script that calls it needs the usual
    `if __name__ == "__main__"`.

    Raises:
        InputError, ScheduleError, ModelError: something asked for is not there,
            wrong, or at odds with the run in `run_dir`; nothing has been lost then.
        EngineDied, RolloutError: the rollouts of a step cannot be completed.
        RankFailed: the same, on one of several ranks.
        FloatingPointError: the gradients of `MAX_SKIPPED_STEPS` optimizer steps in a row were not
            finite. A single such step is skipped.
    """
    with joined() as ranks, open_run(config, prepare(config, ranks.world), resume, ranks) as run:
        for step in range(run.progress.steps_taken, config.steps):
            train_step(run, step)
            if _is_due(run.progress.steps_taken, config.checkpoint.every_steps):
                run.save()
        if config.evaluation.every_steps:
            run.log.write(run.progress.steps_taken, evaluate(run))
    return newest_checkpoint(config.run_dir)


def train_step(run: Run, step: int) -> None:
    """Take training step number `step`: roll out with the current weights, then update them."""
    config, actor = run.config, run.actor
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
        scored = score(run.policy, batch, config)
    on_policy = config.algorithm.old_logprobs == "update"
    correction = None if on_policy else _correct(batch, scored, config)
    reference = None
    # Both passes change the weights in place and restore them, which a signal must not cut short.
    if run.reference is not None:
        with clock("reference"), run.termination.held_back():
            reference = run.reference.logprobs(batch, config.rollout.temperature)
    read = kv_metrics(batch.rollouts, actor.ladder.schedules) | prefill_metrics(batch.rollouts)
    with clock("mismatch"), run.termination.held_back():
        rates, positions = actor.acceptance(batch)
    lr = learning_rate(config.optimizer, step, config.steps)
    run.policy.optimizer.set_learning_rate(lr)
    tails = measured_tails(batch, rates, config.mismatch.sequences)
    count = config.logging.response_groups
    shown = response_rows(groups, rewards, collected.parts, tails, count)
    with run.progress.updating(step, collected.replaced, collected.carried):
        with clock("update"):
            updated = update(run.policy, batch, scored, correction, config, reference)
        correction = correction or _correct(batch, scored, config)
        move = actor.ladder.observe(rates, positions)
        if move is not None:
            run.log.event(step, move.line(), asdict(move))
        if actor.adapter is not None:
            with clock("distill"):
                updated |= actor.distill(batch)
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
            | updated
            | {"actor/lr": lr}
            | evaluated
            | clock.metrics(collected.tokens),
        )
    # After the step, so that the checkpoint that is written on an error matches the metrics.
    _require_finite_gradients(run.policy)


@dataclass(frozen=True, eq=False)
class Scored:
    """Dense log-probs and entropies, fp32 [N] on the CPU, of all response tokens of a batch."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


def score(policy: DensePolicy, batch: Batch, config: TrainConfig) -> Scored:
    """Log-probs and entropies of the batch under the current policy.

    With `old_logprobs = "update"` only those of responses outside the loss are computed; `update`
    fills in the others.
    """
    tokens, sequences = torch.arange(len(batch.advantages)), batch.sequences
    if config.algorithm.old_logprobs == "update":
        left_out = (~batch.in_loss).nonzero().flatten().tolist()
        sequences = [sequences[index] for index in left_out]
        tokens = tokens[(~batch.in_loss).repeat_interleave(torch.tensor(batch.lengths))]
    scored = Scored(torch.empty(len(batch.advantages)), torch.empty(len(batch.advantages)))
    if sequences:
        parts = policy.score_with_entropy(sequences, config.rollout.temperature)
        scored.logprobs[tokens], scored.entropies[tokens] = map(torch.cat, parts)
    return scored


def update(
    policy: DensePolicy,
    batch: Batch,
    scored: Scored,
    correction: Correction | None,
    config: TrainConfig,
    reference: torch.Tensor | None = None,
) -> dict[str, float]:
    """One optimizer step per mini-batch; metrics are means over those that were taken.

    If `correction` is None, each loss computes its own, and the log-probs and entropies that are
    missing in `scored` are filled in.
    `reference` [N] are log-probs of the reference policy, for the KL term.
    """
    settings = config.algorithm
    rows: list[dict[str, float]] = []
    skipped = 0
    for sequences, tokens in batch.mini_batches(settings.mini_batches):
        loss: MiniBatchLoss
        lengths = [sampled_tokens(sequence) for sequence in sequences]
        shares = token_shares(settings.aggregation, lengths, _most_tokens(config))
        kept = None if reference is None else reference[tokens]
        if correction is None:
            rollout, advantages = batch.rollout_logprobs[tokens], batch.advantages[tokens]
            loss = OnPolicyLoss(rollout, advantages, lengths, settings, shares, kept)
            entropies = torch.zeros(len(tokens))
            result = policy.loss_step(sequences, loss, config.rollout.temperature, entropies)
            scored.logprobs[tokens] = policy.ranks.add(loss.dense_logprobs)
            scored.entropies[tokens] = entropies
        else:
            dense, weights = scored.logprobs[tokens], correction.weights[tokens]
            advantages = batch.advantages[tokens]
            loss = MiniBatchLoss(dense, advantages, weights, settings, shares, kept)
            result = policy.loss_step(sequences, loss, config.rollout.temperature)
        if result.taken:
            metrics = policy.ranks.total(loss.metrics)
            rows.append(metrics | {"actor/grad_norm": result.grad_norm})
        else:
            skipped += 1
    means = {name: float(np.mean([row[name] for row in rows])) for name in (rows or [{}])[0]}
    counts = {"actor/optimizer_steps": float(len(rows)), "actor/skipped_steps": float(skipped)}
    return means | counts


def _most_tokens(config: TrainConfig) -> int:
    """Response tokens that an optimizer step can have."""
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt // config.algorithm.mini_batches
    return samples * rollout.max_new_tokens


def _correct(batch: Batch, scored: Scored, config: TrainConfig) -> Correction:
    return correct(scored.logprobs, batch.rollout_logprobs, batch.lengths, config.algorithm)


def _require_finite_gradients(policy: DensePolicy) -> None:
    skipped = policy.optimizer.skipped_in_a_row
    if skipped >= MAX_SKIPPED_STEPS:
        raise FloatingPointError(
            f"the gradients of {skipped} optimizer steps in a row were not finite:"
            " none of these steps was taken; look for rewards that are not finite, or lower"
            " optimizer.lr"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
