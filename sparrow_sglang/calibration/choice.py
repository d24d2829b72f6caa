"""From measured acceptance rates to the cheapest budget per bin that holds a tail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.mismatch.tail import (
    MIN_CLUSTERS,
    TAIL_PERCENTILE,
    BinTail,
    TailStatistics,
    bins_of_lengths,
)

CONFIDENCE = 0.95


def bin_tails(
    generations: Sequence[Tokens], bin_tokens: int, page_size: int, num_bins: int | None = None
) -> dict[int, BinTail]:
    """Tail of the acceptance rate per bin, over the given tokens. All generations of a prompt count
    as one cluster. With `num_bins`, those of a schedule, the last bin has no end."""
    statistics = TailStatistics(bin_tokens)
    for tokens in generations:
        bins = bins_of_lengths(tokens.cached, bin_tokens, page_size)
        if num_bins is not None:
            bins = np.minimum(bins, num_bins - 1)
        statistics.add(tokens.prompt, bins, tokens.rates)
    return {tail.bin: tail for tail in statistics.bins(TAIL_PERCENTILE, CONFIDENCE)}


def shortage(tail: BinTail | None, min_tokens: int) -> str:
    """Why a bin cannot be judged, in a few words; empty if it can."""
    if tail is None or tail.tokens < min_tokens:
        return "too few tokens"
    return "too few prompts" if tail.tail_low is None else ""


def holds(tail: BinTail, target: float) -> bool:
    """Whether even the lower end of the tail's confidence interval reaches the target. Point
    estimates are noisy: the cheapest of many that reach the target often does so by chance."""
    return tail.tail_low is not None and tail.tail_low >= target


@dataclass(frozen=True)
class MeasuredTails:
    """Tails under fixed budgets, by KV budget in tokens and bin. A bin needs `min_tokens` to be
    judged."""

    by_budget: Mapping[int, Mapping[int, BinTail]]
    bin_tokens: int
    min_tokens: int

    @property
    def bins(self) -> list[int]:
        return sorted({index for bins in self.by_budget.values() for index in bins})

    @property
    def page(self) -> int:
        """Tokens that bins and all budgets are multiples of."""
        return gcd(self.bin_tokens, *self.by_budget)

    def whole_budget(self, index: int) -> int:
        """Budget in tokens with which every layer reads all that is cached in bin `index`."""
        return (index + 1) * self.bin_tokens

    def need(self, index: int, target: float) -> int | None:
        """Cheapest budget that holds in this bin, as do all larger ones; the dense one if none
        does; None if no budget can be judged. The larger ones must hold too, because with far too
        small a budget a model repeats itself, and both distributions agree on the repetition. A
        larger one whose tail reaches the target without a lower bound, as its lowest rates come
        from a few prompts, proves nothing and is passed over."""
        enough = {
            budget: bins[index]
            for budget, bins in self.by_budget.items()
            if not shortage(bins.get(index), self.min_tokens)
        }
        if not enough:
            return None
        need = whole = self.whole_budget(index)
        for budget, tail in sorted(enough.items(), reverse=True):
            if budget >= whole or (tail.tail_low == 0 and tail.tail >= target):
                continue
            if not holds(tail, target):
                break
            need = budget
        return need


def tail_fields(tail: BinTail) -> dict[str, Any]:
    names = ("tokens", "tail", "tail_low", "tail_high", "mean")
    return {name: getattr(tail, name) for name in names}


def choose(tails: MeasuredTails, target: float, num_bins: int) -> list[dict[str, Any]]:
    """Choose per bin the cheapest budget that holds as do all larger ones, made monotone.

    In a bin where budgets were measured and none holds, the budget is one with which every step in
    the bin is dense: the end of the bin. A bin without enough tokens takes the need of the next
    filled one, as needs grow with length. Beyond the last filled bin, the need of that bin is
    scaled in proportion to the length. Raises
    `CalibrationError` if no bin is filled.

    Returns:
        A row per bin, as schedules hold them in their provenance: `needed_tokens` is the budget
        that the bin itself needs, `budget_tokens` the same after making the schedule monotone,
        `basis` "measured", "dense" (no page is left out) or "extrapolated" (no budget has enough
        tokens here); and the tail that was measured at the budget, if there is one.
    """
    needs = {index: tails.need(index, target) for index in range(num_bins)}
    needed = {index: need for index, need in needs.items() if need is not None}
    if not needed:
        counts = [tail.tokens for bins in tails.by_budget.values() for tail in bins.values()]
        raise CalibrationError(
            f"no bin has enough tokens: {max(counts, default=0)} at most, expected --min-tokens"
            f" {tails.min_tokens} from {MIN_CLUSTERS} prompts; add --samples or prompts"
        )
    rows: list[dict[str, Any]] = []
    budget = 0
    for index in range(num_bins):
        need = needed.get(index)
        if need is None:
            need = _extrapolate(needed, index, tails.page)
        budget = max(budget, need)
        basis = "measured"
        if index not in needed:
            basis = "extrapolated"
        elif budget >= tails.whole_budget(index):
            basis = "dense"
        row = {"bin": index, "budget_tokens": budget, "needed_tokens": need, "basis": basis}
        evidence = tails.by_budget.get(budget, {}).get(index)
        rows.append(row | ({"tokens": 0} if evidence is None else tail_fields(evidence)))
    return rows


def _extrapolate(needed: Mapping[int, int], index: int, page: int) -> int:
    later = [filled for filled in needed if filled > index]
    if later:
        return needed[min(later)]
    last = max(needed)
    return -(-needed[last] * (index + 1) // ((last + 1) * page)) * page
