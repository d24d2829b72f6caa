"""The gate of DistillSparse's adapter: the share of it that rollouts use, by measured tails."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.distill import Gains, SparseAdapter
from sparrow_sglang.rl.metrics import MIN_PROMPTS, Acceptance, tail_percentile
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.schedules.schedule import BudgetSchedule

SCALES = (0.0, 0.5, 1.0)
"""Shares of the adapter that rollouts may use; at 0 they are those of an actor without it."""

WINDOW_STEPS = 10
"""Latest steps whose measurements at one scale are pooled."""

STANDARD_ERRORS = 3.0
"""With `MIN_PROMPTS` a one-sided bound of 99 % by Student's t, as each step looks again."""


def choose_scale(
    adapter: SparseAdapter,
    policy: DensePolicy,
    batch: Batch,
    schedule: BudgetSchedule,
    temperature: float,
) -> dict[str, float]:
    """Set `adapter.scale` to the `best_scale` on the responses of `batch`, with the latest
    measurements at the same scale; returns metrics. Rates are those of the engine's dtype and
    delivery."""
    actors = [partial(adapter.delivered, scale) for scale in SCALES]
    rates = policy.acceptances(batch.sequences, schedule, actors, temperature)
    measured = [Acceptance.of(batch.rollouts, np.concatenate(of), schedule) for of in rates]
    counted = measured[0].counted
    if adapter.schedule != schedule.name:
        # A resumed run may have another one.
        adapter.schedule, adapter.gains = schedule.name, []
    if counted.any():
        adapter.gains = [*adapter.gains, gains(adapter.scale, measured)][-WINDOW_STEPS:]
    prompts = len({prompt for step in adapter.gains for prompt in step})
    scale = best_scale(adapter.scale, adapter.gains)
    if scale != adapter.scale:
        adapter.scale, adapter.gains = scale, []
    return {"sparrow/distill_scale": scale, "sparrow/distill_gate_prompts": float(prompts)} | {
        f"sparrow/distill_p05_scale{scale:g}": tail_percentile(acceptance.rates[counted])
        for scale, acceptance in zip(SCALES, measured, strict=True)
        if counted.any()
    }


def gains(current: float, measured: Sequence[Acceptance]) -> Gains:
    """What each of `SCALES`, measured on the same tokens, gains over `current`: the number of
    tokens lifted above their bin's tail percentile at the current scale."""
    now = measured[SCALES.index(current)]
    tails = np.full(len(now.bins), np.nan)
    for index in np.unique(now.bins[now.counted]).tolist():
        tails[now.bins == index] = tail_percentile(now.rates[now.bins == index])
    gained = [(now.rates <= tails).astype(int) - (some.rates <= tails) for some in measured]
    prompts = np.array([rollout.prompt_id for rollout in now.rollouts])[now.owners]
    return {
        prompt: (int(tokens.sum()), *(int(gain[tokens].sum()) for gain in gained))
        for prompt in dict.fromkeys(prompts[now.counted].tolist())
        for tokens in [now.counted & (prompts == prompt)]
    }


def best_scale(current: float, window: Sequence[Gains]) -> float:
    """The one of `SCALES` that rollouts should use, by the `gains` of several steps over `current`.
    A scale must gain by `STANDARD_ERRORS` of a ratio of means over clusters (Cochran, Sampling
    Techniques, 6.3), which are prompts; the largest gain wins. Below `MIN_PROMPTS` the scale
    stays."""
    pooled: dict[str, NDArray[np.float64]] = {}
    for step in window:
        for prompt, counts in step.items():
            pooled[prompt] = pooled.get(prompt, 0.0) + np.array(counts, np.float64)
    count = len(pooled)
    if count < MIN_PROMPTS:
        return current
    tokens, *gained = np.array(list(pooled.values())).T
    better: dict[float, float] = {}
    for scale, below in zip(SCALES, gained, strict=True):
        gain = below.sum() / tokens.sum()
        squares = np.square(below - gain * tokens).sum()
        error = np.sqrt(count / (count - 1) * squares) / tokens.sum()
        if gain > STANDARD_ERRORS * error:
            better[scale] = gain
    return max(better, key=lambda scale: better[scale], default=current)
