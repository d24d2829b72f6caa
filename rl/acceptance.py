"""Exact acceptance rates of some of a step's responses, and their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import TAIL_PERCENTILE
from sparrow_sglang.mismatch.token_bins import NOT_COUNTED, token_bins
from sparrow_sglang.rl.types import Rollout
from sparrow_sglang.schedules.schedule import BudgetSchedule

MIN_PROMPTS = 8
"""Prompts below which measured tails do not change how much of an adapter rollouts use."""


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Rates [N] float64 of the sampled tokens of `rollouts`, concatenated, under one schedule.
    `bins` [N] int64 are those of `token_bins`; `owners` [N] int64 index `rollouts`."""

    rollouts: tuple[Rollout, ...]
    rates: NDArray[np.float64]
    bins: NDArray[np.int64]
    owners: NDArray[np.int64]

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], rates: NDArray[np.float64], schedule: BudgetSchedule
    ) -> "Acceptance":
        """`rates` [N] are those of `rollouts` under `schedule`, in order."""
        bins = [
            token_bins(schedule, len(one.prompt_ids), len(one.response_ids)) for one in rollouts
        ]
        owners = np.repeat(np.arange(len(rollouts)), [len(one.logprobs) for one in rollouts])
        return cls(tuple(rollouts), rates, np.concatenate([np.empty(0, np.int64), *bins]), owners)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which tokens [N] were decoded sparsely."""
        return self.bins != NOT_COUNTED

    def tails(self) -> dict[tuple[str, tuple[int, ...]], float]:
        """Tail percentile of each response with sparse tokens, by prompt id and token ids: a step
        with more prompts than the data samples some twice."""
        return {
            (rollout.prompt_id, rollout.response_ids): tail_percentile(rates)
            for index, rollout in enumerate(self.rollouts)
            if (rates := self.rates[self.counted & (self.owners == index)]).size
        }


def acceptance_metrics(rates: NDArray[np.float64], bins: NDArray[np.int64]) -> dict[str, float]:
    """Tail percentile and mean of exact acceptance `rates` [N], in all and per bin of
    `token_bins`. Empty if no token was decoded sparsely."""
    counted = bins != NOT_COUNTED
    rates, bins = rates[counted], bins[counted]
    if not rates.size:
        return {}
    return {
        "sparrow/accept_p05": tail_percentile(rates),
        "sparrow/accept_mean": float(rates.mean()),
    } | {
        f"sparrow/accept_p05_bin{index}": tail_percentile(rates[bins == index])
        for index in np.unique(bins)
    }


def tail_percentile(values: NDArray[np.float64]) -> float:
    """The 5th percentile of `values` [N], as the ceil(N / 20)-th smallest."""
    return float(np.percentile(values, TAIL_PERCENTILE, method="inverted_cdf"))
