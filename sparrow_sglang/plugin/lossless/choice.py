"""What the next round does, by measured times and the recent acceptance. Deterministic in its
inputs, so that the ranks of a model agree without a message."""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sparrow_sglang.planning.rounds import DENSE, Plan, expected_tokens, plans, runs_twice

GAIN = 1.03
"""Rounds draft only where tokens per second rise by this factor."""
PROBE_ROUNDS = 64
"""A kind of draft that so many rounds have not tried is tried in the next, if it would pay."""
GOOD_ACCEPTANCE, GOOD_LOOKUPS = 0.95, 0.5
"""Acceptances of a sparse draft and of a token looked up, at which such a probe has to pay."""
_LOOP = 2.2
"""Launches of a pass that take the host as long as SGLang's loop: 2.2 ms beside 1 ms on an H200's.
No round of a small model takes less, however short it is on the device."""
# Until measured, the acceptances, each counted as so many drafts.
_PRIOR, _PRIOR_LOOKUPS, _PRIOR_DRAFTS = 0.9, 0.45, 16.0
_WINDOW = 200.0
"""Drafts after which one that was judged counts 1/e."""


class RoundTimes:
    """Measured seconds of rounds, linear between batch sizes, lengths and numbers of sparse drafts,
    constant beyond.

    Args:
        plans: the rounds to choose from.
        rows: requests, tokens of each, and the seconds of each of `measured(plans)`.
        launch_s: that the host takes to launch a pass.
    """

    def __init__(
        self, plans: Sequence[Plan], rows: Sequence[Sequence[float]], launch_s: float
    ) -> None:
        by_batch: defaultdict[float, list[Sequence[float]]] = defaultdict(list)
        for batch, *of_length in sorted(map(tuple, rows)):
            by_batch[batch].append(of_length)
        self.plans, self._batches, self._launch_s = list(plans), list(by_batch), launch_s
        self._columns = [np.array(lines).T for lines in by_batch.values()]

    @staticmethod
    def measured(plans: Sequence[Plan]) -> list[Plan]:
        """The rounds to time: of each number of rows those with the fewest and the most drafts."""
        of_rows: defaultdict[int, list[Plan]] = defaultdict(list)
        for plan in plans:
            of_rows[plan.rows].append(plan)
        return [plan for group in of_rows.values() for plan in dict.fromkeys((group[0], group[-1]))]

    @lru_cache(maxsize=1)  # noqa: B019
    def at(self, batch: float, length: float, in_pairs: bool = True) -> dict[Plan, float]:
        """Seconds of rounds of `batch` requests with a mean of `length` tokens: as measured, and no
        less than the host needs, which returns to SGLang's loop once for two narrow rounds if they
        run `in_pairs`."""
        by_batch = [
            [np.interp(length, lengths, of_plan) for of_plan in seconds]
            for lengths, *seconds in self._columns
        ]
        known = [float(np.interp(batch, self._batches, of)) for of in np.transpose(by_batch)]
        by_rows: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for plan, seconds in zip(self.measured(self.plans), known, strict=True):
            by_rows[plan.rows][plan.drafts] = seconds
        least: dict[Plan, float] = {}
        for plan in self.plans:
            of_rows, most = by_rows[plan.rows], self.plans[-1].rows
            on_device = float(np.interp(plan.drafts, list(of_rows), list(of_rows.values())))
            # Dense steps are taken for faster than they are, so that drafts which are not accepted
            # do not pay by that alone: the loop may be faster.
            shares = plan == DENSE or (in_pairs and runs_twice(plan, most))
            loops = 0.5 if shares else 1.0
            on_host = (loops * _LOOP + plan.drafts + 1) * self._launch_s
            least[plan] = max(on_device, on_host)
        return least

    def summary(self) -> str:
        """From which lengths on drafts pay, in one line, by batch size."""
        starts = []
        lookups = [GOOD_LOOKUPS] * max(plan.lookups for plan in self.plans)
        for batch, (lengths, *_) in zip(self._batches, self._columns, strict=True):
            good = GOOD_ACCEPTANCE, lookups
            paying = [n for n in lengths if best(self.at(batch, n), *good) != DENSE]
            start = f"from {int(paying[0]):,} tokens on" if paying else "at no length"
            starts.append(f"{start} ({batch})")
        accepted = f"{GOOD_ACCEPTANCE} of the sparse drafts"
        if lookups:
            accepted += f" and {GOOD_LOOKUPS} of those looked up"
        listed = ", ".join(starts)
        return f"rounds draft where it pays: with {accepted} accepted {listed}, by batch size"


def best(seconds: dict[Plan, float], sparse: float, lookups: Sequence[float]) -> Plan:
    """The round with most tokens per second; a dense step unless another gains `GAIN`."""
    rates = {plan: expected_tokens(plan, sparse, lookups) / s for plan, s in seconds.items()}
    plan = max(rates, key=lambda plan: rates[plan])
    return plan if rates[plan] > GAIN * rates[DENSE] else DENSE


class _Rate:
    """The recent share of accepted drafts among those that were judged, as their predecessors were
    accepted."""

    def __init__(self, prior: float) -> None:
        self._accepted, self._judged = prior * _PRIOR_DRAFTS, _PRIOR_DRAFTS

    @property
    def value(self) -> float:
        return self._accepted / self._judged

    def observe(self, judged: int, accepted: int) -> None:
        decay = math.exp(-judged / _WINDOW)
        self._accepted = decay * self._accepted + accepted
        self._judged = decay * self._judged + judged


class RoundChoice:
    """Chooses rounds of up to `width` rows. They are dense steps until `times` is set.

    Attributes:
        plans: all rounds that may be chosen.
        times: None until they have been timed.
    """

    def __init__(self, width: int, looks_up: bool) -> None:
        self.plans = plans(width, looks_up)
        self.times: RoundTimes | None = None
        self._sparse = _Rate(_PRIOR)
        # By place behind the latest token or the sparse drafts.
        self._lookups = [_Rate(_PRIOR_LOOKUPS) for _ in range(width - 1)]
        self._untried = {"drafts": 0, "lookups": 0}

    def next_round(self, batch: int, length: float, in_pairs: bool = True) -> Plan:
        """The next round, of requests with a mean of `length` tokens, and as in `RoundTimes.at`."""
        if self.times is None:
            return DENSE
        seconds = self.times.at(batch, length // 64 * 64, in_pairs)
        sparse, lookups = self._sparse.value, [rate.value for rate in self._lookups]
        plan = best(seconds, sparse, lookups)
        probes = {
            "drafts": (GOOD_ACCEPTANCE, lookups),
            "lookups": (sparse, [GOOD_LOOKUPS] * len(lookups)),
        }
        for kind, good in probes.items():
            tried = bool(getattr(plan, kind))
            self._untried[kind] = 0 if tried else self._untried[kind] % PROBE_ROUNDS + 1
            if self._untried[kind] == PROBE_ROUNDS:
                plan = best(seconds, *good)
        return plan

    def observe(self, plan: Plan, accepted: Sequence[int]) -> list[tuple[int, int]]:
        """Take the drafts accepted of each request in a round. Returns how many were judged, as
        their predecessors were accepted, and how many of those accepted: of the sparse drafts, and
        of the tokens looked up."""
        most = plan.drafts + plan.lookups
        reached = np.bincount(accepted, minlength=most + 1)[::-1].cumsum()[::-1].tolist()
        places = list(pairwise(reached))
        sparse, lookups = places[: plan.drafts], places[plan.drafts :]
        for rate, place in zip(self._lookups, lookups, strict=False):
            rate.observe(*place)
        totals = [(sum(j for j, _ in part), sum(a for _, a in part)) for part in (sparse, lookups)]
        self._sparse.observe(*totals[0])
        return totals
