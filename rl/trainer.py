"""GRPO from sparse rollouts: the loop.

One step: sync the weights, roll out sparsely, reward, group-relative advantages, dense log-probs,
corrected and clipped loss, optimizer step, metrics. What each of these does is in the module that
is called for it.
"""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from sparrow_sglang.rl.advantages import group_advantages
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import AlgorithmConfig, TrainConfig
from sparrow_sglang.rl.correction import correct
from sparrow_sglang.rl.distill import ADAPTER, PolicyTerm
from sparrow_sglang.rl.engines.buckets import Weights
from sparrow_sglang.rl.loss import policy_loss
from sparrow_sglang.rl.metrics import acceptance_metrics, kv_metrics, rollout_metrics
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.runs.data_order import prompts_of_step
from sparrow_sglang.rl.runs.run import Positions, Rates, Run, newest_checkpoint, open_run
from sparrow_sglang.rl.runs.setup import prepare
from sparrow_sglang.rl.tasks.rewards import without_truncated

MAX_SKIPPED_STEPS = 5
"""Optimizer steps in a row whose gradient may not be finite; the run ends with the last of them."""


def train(config: TrainConfig, resume: bool = False) -> Path | None:
    """Train until `config.steps` steps are done; returns the folder of the last checkpoint.

    `resume` goes on from the newest checkpoint in `config.run_dir`, if there is one. SIGTERM and
    Ctrl-C write a checkpoint and end the process by `Stopped`, a `SystemExit`; any error outside an
    optimizer step is raised after a checkpoint, too. To be called in the main thread; a script that
    does needs the usual `if __name__ == "__main__"`.

    Raises:
        ConfigError, CheckpointError, ScheduleError, ModelError: something asked for is not there,
            wrong, or at odds with the run in `run_dir`; nothing has been lost then.
        EngineDied, RolloutError: the rollouts of a step cannot be completed.
        FloatingPointError: the gradients of `MAX_SKIPPED_STEPS` optimizer steps in a row were not
            finite. A single such step is skipped.
    """
    setup = prepare(config)
    with open_run(config, setup, resume) as run:
        for step in range(run.steps_taken, config.steps):
            train_step(run, step)
            if _is_due(run.steps_taken, config.checkpoint.every_steps):
                run.save()
        if config.evaluation.every_steps:
            run.report(run.steps_taken, evaluate(run))
    return newest_checkpoint(config.run_dir)


def train_step(run: Run, step: int) -> None:
    """Roll out with the weights of `step` earlier steps, and take one more."""
    config, algorithm = run.config, run.config.algorithm
    clock = run.log.clock(step)
    evaluated: dict[str, float] = {}
    if _is_due(step, config.evaluation.every_steps):
        with clock("evaluation"):
            evaluated = evaluate(run)
    with clock("sync"):
        sync_actor(run)

    count, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    prompts = prompts_of_step(run.setup.train, count, step, config.seed)
    temperature = config.rollout.temperature
    beside = config.distill.enabled and config.distill.delivery == "lora"
    adapter = ADAPTER if beside else None
    sampling = Sampling(config.rollout.max_new_tokens, temperature, adapter=adapter)
    with clock("rollout"):
        finished = run.log.responses("rollout", count * samples)
        groups = run.engine.generate(prompts, samples, sampling, finished)
        run.engine.release()
    with clock("reward"):
        scores = run.judges.score(groups)
    rewards = scores.rewards
    if config.rollout.truncated == "penalty":
        rewards = without_truncated(rewards, groups)
    advantages = group_advantages(rewards, algorithm.std_normalisation)
    batch = Batch.of(groups, advantages)
    if config.rollout.truncated == "mask":
        batch = batch.masking_truncated()

    with clock("logprobs"):
        scored, entropies = run.policy.score_with_entropy(batch.sequences, temperature)
    dense, entropy = torch.cat(scored), float(torch.cat(entropies).double().mean())
    correction = correct(dense, batch.rollout_logprobs, batch.lengths, algorithm)
    read = kv_metrics(batch.rollouts, run.schedule)
    with clock("mismatch"):
        rates, positions = measure_acceptance(run, batch)
    with run.updating(step):
        with clock("update"):
            updated = update(run.policy, batch, dense, correction.weights, algorithm, temperature)
        run.follow_tails(step, rates, positions)
        if run.adapter is not None and run.schedule is not None:
            with clock("distill"):
                # Towards the policy that the next step will roll out.
                some = batch.spread(config.distill.sequences)
                term = PolicyTerm(some.rollout_logprobs, some.advantages, algorithm)
                updated |= run.adapter.step(some.sequences, run.schedule, term, temperature)
        run.report(
            step,
            rollout_metrics(groups, rewards)
            | scores.metrics()
            | advantages.metrics()
            | correction.metrics
            | (acceptance_metrics(rates, positions) if rates.size else {})
            | read
            | {"actor/entropy": entropy}
            | updated
            | evaluated
            | clock.metrics(tokens=sum(batch.lengths)),
        )
    # After the step, so that the checkpoint that is written on an error matches the metrics.
    _require_finite_gradients(run.policy)


def sync_actor(run: Run) -> None:
    """Have the engine sample from the policy's weights, with the adapter if there is one."""
    merged = run.adapter is not None and run.config.distill.delivery == "merged"
    run.load(Weights(run.adapter.merged_weights if merged else run.policy.named_weights))
    run.sync_schedule()
    if run.adapter is not None and not merged:
        run.engine.set_adapter(ADAPTER, run.adapter.tensors(), run.adapter.lora_config())


def update(
    policy: DensePolicy,
    batch: Batch,
    dense_logprobs: torch.Tensor,
    weights: torch.Tensor,
    settings: AlgorithmConfig,
    temperature: float = 1.0,
) -> dict[str, float]:
    """One optimizer step per mini-batch; metrics are means over those that were taken.

    `dense_logprobs`, at `temperature`, and `weights` are [N], of all response tokens of the batch.
    """
    rows: list[dict[str, float]] = []
    skipped = 0
    for sequences, tokens in batch.mini_batches(settings.mini_batches):
        row: dict[str, float] = {}

        def loss(
            logprobs: torch.Tensor,
            where: torch.Tensor,
            tokens: torch.Tensor = tokens,
            row: dict[str, float] = row,
        ) -> torch.Tensor:
            chosen = tokens[where.cpu()]
            device = logprobs.device
            result = policy_loss(
                logprobs,
                dense_logprobs[chosen].to(device),
                batch.advantages[chosen].to(device),
                weights[chosen].to(device),
                batch_tokens=len(tokens),
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                dual_clip=settings.dual_clip,
            )
            for name, value in result.metrics.items():
                row[name] = row.get(name, 0.0) + value
            return result.loss

        result = policy.loss_step(sequences, loss, temperature)
        if result.taken:
            rows.append(row | {"actor/grad_norm": result.grad_norm})
        else:
            skipped += 1
    means = {name: float(np.mean([row[name] for row in rows])) for name in (rows or [{}])[0]}
    counts = {"actor/optimizer_steps": float(len(rows)), "actor/skipped_steps": float(skipped)}
    return means | counts


def measure_acceptance(run: Run, batch: Batch) -> tuple[Rates, Positions]:
    """Exact acceptance rates of some of the step's responses, and where their tokens stand.

    Of the actor that sampled them, adapter and all; nothing for dense rollouts.
    """
    schedule, count = run.schedule, run.config.mismatch.sequences
    if schedule is None or count == 0:
        return np.empty(0), np.empty(0, np.int64)
    sequences = batch.spread(count).sequences
    adapted = run.adapter.worn if run.adapter else nullcontext
    rates = run.policy.acceptance(sequences, schedule, adapted, run.config.rollout.temperature)
    positions = [np.arange(len(prompt), len(prompt) + len(ids)) for prompt, ids in sequences]
    return np.concatenate(rates), np.concatenate(positions)


def evaluate(run: Run) -> dict[str, float]:
    """Mean reward of held-out prompts: dense decode of the policy, without adapter.

    `eval/pass_rate` is that mean, whatever its name where a task gives rewards between 0 and 1.
    """
    settings = run.config.evaluation
    sampling = Sampling(run.config.rollout.max_new_tokens, settings.temperature, dense=True)
    prompts = run.setup.heldout[: settings.prompts]
    run.load(Weights(run.policy.named_weights))
    samples = settings.samples_per_prompt
    finished = run.log.responses("evaluation", len(prompts) * samples)
    groups = run.engine.generate(prompts, samples, sampling, finished)
    rewards = np.array([group.mean() for group in run.judges.score(groups).rewards])
    lengths = [len(rollout.response_ids) for group in groups for rollout in group.rollouts]
    rate, error = float(rewards.mean()), float(rewards.std() / np.sqrt(len(rewards)))
    run.log.say(
        f"after {run.steps_taken} steps: held-out pass rate {rate:.3f} +- {error:.3f} of"
        f" {len(prompts)} prompts"
    )
    return {
        "eval/pass_rate": rate,
        "eval/pass_rate_stderr": error,
        "eval/response_length": float(np.mean(lengths)),
    }


def _require_finite_gradients(policy: DensePolicy) -> None:
    if policy.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise FloatingPointError(
            f"the gradients of {policy.skipped_in_a_row} optimizer steps in a row were not finite:"
            " none of these steps was taken; look for rewards that are not finite, or lower"
            " optimizer.lr"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
