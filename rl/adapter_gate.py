"""The scale at which rollouts use the adapter: changed only where measured tails prove it better.

In: the adapter after its step, and responses, which are others than the step learned from if there
are any. Out: the scale of the adapter, and the tail percentiles of all scales. At scale 0 rollouts
are those of a sparse actor without adapter.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from sparrow_sglang.rl.acceptance import (
    MIN_OBSERVATIONS,
    STANDARD_ERRORS,
    Acceptance,
    Share,
    tail_percentile,
)
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.schedule import BudgetSchedule

SCALES = (0.0, 0.5, 1.0)


def choose_scale(
    adapter: SparseAdapter,
    policy: DensePolicy,
    batch: Batch,
    schedule: BudgetSchedule,
    temperature: float,
) -> dict[str, float]:
    """Set `adapter.scale` to the `best_scale` on the responses of `batch`; returns metrics.

    Acceptance rates are measured in the engine's dtype, with the adapter merged or unmerged as the
    engine gets it.
    """
    actors = [partial(adapter.delivered, scale) for scale in SCALES]
    rates = policy.acceptances(batch.segments, schedule, actors, temperature)
    measured = [Acceptance.of(batch.rollouts, np.concatenate(some), schedule) for some in rates]
    counted = measured[0].counted
    if counted.any():
        adapter.scale = best_scale(adapter.scale, measured)
    return {"sparrow/distill_scale": adapter.scale} | {
        f"sparrow/distill_p05_scale{scale:g}": tail_percentile(some.rates[counted])
        for scale, some in zip(SCALES, measured, strict=True)
        if counted.any()
    }


def best_scale(current: float, measured: Sequence[Acceptance]) -> float:
    """The one of `SCALES`, each with its measurement of the same tokens, that rollouts should use.

    Compared is the share of tokens whose acceptance rate is at most what, in their bin, is the tail
    percentile at the scale that is used now. Differences are taken by response. Another scale is
    taken if its share is smaller by two standard errors of the difference, so that noise does not
    move the scale; of several such scales the one with the smallest share. With fewer than
    `MIN_OBSERVATIONS` responses the scale stays.
    """
    now = measured[SCALES.index(current)]
    tails = np.full(len(now.bins), np.nan)
    for index in np.unique(now.bins[now.counted]).tolist():
        tails[now.bins == index] = tail_percentile(now.rates[now.bins == index])
    better: dict[float, float] = {}
    for scale, some in zip(SCALES, measured, strict=True):
        gained = (now.rates <= tails).astype(int) - (some.rates <= tails)
        counts = [
            (float(gained[own].sum()), float(own.sum()))
            for index in range(len(now.rollouts))
            if (own := now.counted & (now.owners == index)).any()
        ]
        if len(counts) < MIN_OBSERVATIONS:
            return current
        gain = Share.of(counts)
        if gain.value > STANDARD_ERRORS * gain.error:
            better[scale] = gain.value
    return max(better, key=lambda scale: better[scale], default=current)
