"""How many tokens a round drafts, by its costs and by the drafts accepted lately.

Deterministic in what it is given, so that the ranks of a model agree without a message.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GAIN = 1.03
"""The number of drafts changes only where tokens per second rise by this factor."""
PROBE_ROUNDS = 64
PROBE_ACCEPTANCE = 0.97
"""While rounds draft nothing, one in PROBE_ROUNDS does, if drafts would pay at this acceptance."""
_TYPICAL = 0.95
# Until measured, the acceptance of a draft, counted as so many drafts.
_PRIOR, _PRIOR_DRAFTS = 0.9, 16.0
_DECAY = 0.9


class Costs(NamedTuple):
    """Seconds of a sparse draft step, a verification, and a dense decode step."""

    draft: float
    verify: float
    dense: float

    def tokens_per_second(self, drafts: int, acceptance: float) -> float:
        """Of a request whose drafts are accepted with a constant probability (arXiv 2211.17192)."""
        if not drafts:
            return 1 / self.dense
        expected = sum(acceptance**number for number in range(drafts + 1))
        return expected / (drafts * self.draft + self.verify)

    def best_drafts(self, acceptance: float, most: int, current: int) -> int:
        """The number of drafts, `most` at most, with most tokens per second, or the current one."""
        rates = [self.tokens_per_second(drafts, acceptance) for drafts in range(most + 1)]
        best = int(np.argmax(rates))
        return best if rates[best] > GAIN * rates[current] else current


class CostTable:
    """Measured costs, linear between batch sizes and lengths, and constant beyond."""

    def __init__(self, rows: Sequence[tuple[int, int, float, float, float]]) -> None:
        """Rows of requests, tokens of each, and their `Costs`."""
        by_batch: dict[int, list[tuple[float, ...]]] = {}
        for batch, *of_length in sorted(rows):
            by_batch.setdefault(batch, []).append(tuple(of_length))
        self._batches = list(by_batch)
        self._columns = [np.array(lines).T for lines in by_batch.values()]

    def summary(self, most: int) -> str:
        """From which lengths on drafts pay, in one line, by batch size."""
        starts = []
        for batch, (lengths, *_) in zip(self._batches, self._columns, strict=True):
            paying = [n for n in lengths if self.at(batch, n).best_drafts(_TYPICAL, most, 0)]
            start = f"from {int(paying[0]):,} tokens on" if paying else "at no length"
            starts.append(f"{start} ({batch})")
        return (
            f"rounds draft up to {most} tokens where that pays: at an acceptance of {_TYPICAL}"
            f" {', '.join(starts)}, by batch size"
        )

    def at(self, batch: int, length: float) -> Costs:
        per_batch = [
            [np.interp(length, of_batch[0], seconds) for seconds in of_batch[1:]]
            for of_batch in self._columns
        ]
        return Costs(
            *(
                float(np.interp(batch, self._batches, seconds))
                for seconds in zip(*per_batch, strict=True)
            )
        )


class Pace:
    """Chooses the drafts of each round, up to `most`; always `most` without `costs`."""

    def __init__(self, most: int) -> None:
        self._most = self._drafts = most
        self.costs: CostTable | None = None
        self._accepted = _PRIOR * _PRIOR_DRAFTS
        self._judged = _PRIOR_DRAFTS
        self._undrafted = 0
        # Drafts of the rounds whose outcome is not on the host yet.
        self._in_flight: deque[int] = deque()

    @property
    def acceptance(self) -> float:
        return self._accepted / self._judged

    def next_round(self, batch: int, length: float) -> int:
        """Drafts of the next round, of requests with a mean of `length` tokens."""
        drafts = self._choose(batch, length)
        self._in_flight.append(drafts)
        return drafts

    def _choose(self, batch: int, length: float) -> int:
        if self.costs is None:
            return self._most
        costs = self.costs.at(batch, length)
        self._drafts = costs.best_drafts(self.acceptance, self._most, self._drafts)
        self._undrafted = 0 if self._drafts else self._undrafted + 1
        if self._undrafted < PROBE_ROUNDS:
            return self._drafts
        self._undrafted = 0
        return costs.best_drafts(PROBE_ACCEPTANCE, self._most, 0)

    def observe(self, accepted: Sequence[int]) -> None:
        """The outcome of the oldest round in flight: drafts accepted of each request."""
        drafts = self._in_flight.popleft()
        if drafts:
            self._accepted = _DECAY * self._accepted + sum(accepted)
            # A rejection is judged, too, and what follows it is not.
            rejections = sum(count < drafts for count in accepted)
            self._judged = _DECAY * self._judged + sum(accepted) + rejections
