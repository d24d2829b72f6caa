"""The scale at which rollouts use the adapter: the one with the best measured acceptance tail.

In: the adapter after its step, and responses, which are others than the step learned from if there
are any. Out: the scale of the adapter, and the tail percentiles that chose it. Since 0 is one of
the scales, an adapter may be useless, but does not make the sparse actor worse than it is without
one.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import BIN_TOKENS
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.metrics import tail_percentile
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.schedule import BudgetSchedule

SCALES = (0.0, 0.5, 1.0)
MIN_TOKENS = 200
"""Fewest tokens of a position bin whose tail counts, so that ten of them lie in the tail."""


def choose_scale(
    adapter: SparseAdapter,
    policy: DensePolicy,
    sequences: Sequence[TokenSequence],
    schedule: BudgetSchedule,
    temperature: float,
) -> dict[str, float]:
    """Set `adapter.scale` to the one of `SCALES` with the best tail percentile; returns metrics.

    Acceptance rates are measured in the engine's dtype, with the adapter merged or unmerged as the
    engine gets it.
    """
    actors = [partial(adapter.delivered, scale) for scale in SCALES]
    rates = policy.acceptances(sequences, schedule, actors, temperature)
    positions = np.concatenate(
        [np.arange(len(prompt), len(prompt) + len(response)) for prompt, response in sequences]
    )
    tails = {
        scale: lowest_tail(np.concatenate(measured), positions)
        for scale, measured in zip(SCALES, rates, strict=True)
    }
    adapter.scale = best_scale(tails)
    return {"sparrow/distill_scale": adapter.scale} | {
        f"sparrow/distill_p05_scale{scale:g}": tail for scale, tail in tails.items()
    }


def lowest_tail(rates: NDArray[np.float64], positions: NDArray[np.int64]) -> float:
    """The lowest tail percentile of the position bins with `MIN_TOKENS` or more of the rates [N].

    If no bin has that many, the tail percentile of all rates.
    """
    bins = positions // BIN_TOKENS
    filled = [index for index in np.unique(bins) if (bins == index).sum() >= MIN_TOKENS]
    if not filled:
        return tail_percentile(rates)
    return min(tail_percentile(rates[bins == index]) for index in filled)


def best_scale(tails: Mapping[float, float]) -> float:
    """The scale with the best tail percentile; on a tie, the smallest such scale."""
    return max(sorted(tails), key=lambda scale: tails[scale])
