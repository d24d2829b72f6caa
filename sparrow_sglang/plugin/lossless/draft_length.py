"""How many tokens a round drafts, by measured times and the recent acceptance. Deterministic in its
inputs, so that the ranks of a model agree without a message."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

GAIN = 1.03
"""Rounds draft only where tokens per second rise by this factor."""
PROBE_ROUNDS = 64
GOOD_ACCEPTANCE = 0.95
"""While rounds draft nothing, one in PROBE_ROUNDS does, if drafts would pay at this acceptance."""
# Until measured, the acceptance of a draft, counted as so many drafts.
_PRIOR, _PRIOR_DRAFTS = 0.9, 16.0
_DECAY = 0.9


def best_drafts(seconds: Any, acceptance: float) -> int:
    """The number of drafts with most tokens per second (arXiv 2211.17192). `seconds` [most + 1] are
    those of rounds with 0, 1, ... drafts, each accepted with a probability of `acceptance`."""
    rates = np.cumsum(acceptance ** np.arange(len(seconds))) / seconds
    best = int(rates.argmax())
    return best if rates[best] > GAIN * rates[0] else 0


class RoundTimes:
    """Measured seconds of rounds, linear between batch sizes, lengths and drafts, constant beyond.

    Args:
        most: drafts of the longest rounds.
        rows: requests, tokens of each, and seconds of a round with no, one and `most` drafts.
    """

    def __init__(self, most: int, rows: Sequence[tuple[float, ...]]) -> None:
        by_batch: defaultdict[float, list[list[float]]] = defaultdict(list)
        for batch, *of_length in sorted(rows):
            by_batch[batch].append(of_length)
        self.most, self._batches = most, list(by_batch)
        self._columns = [np.array(lines).T for lines in by_batch.values()]

    def summary(self) -> str:
        """From which lengths on drafts pay, in one line, by batch size."""
        starts = []
        for batch, (lengths, *_) in zip(self._batches, self._columns, strict=True):
            paying = [n for n in lengths if best_drafts(self.at(batch, n), GOOD_ACCEPTANCE)]
            start = f"from {int(paying[0]):,} tokens on" if paying else "at no length"
            starts.append(f"{start} ({batch})")
        return (
            f"rounds draft up to {self.most} tokens where that pays: at an acceptance of"
            f" {GOOD_ACCEPTANCE} {', '.join(starts)}, by batch size"
        )

    @lru_cache(maxsize=1)  # noqa: B019
    def at(self, batch: float, length: float) -> Any:
        """[most + 1] seconds of rounds of `batch` requests with a mean of `length` tokens."""
        by_batch = [
            [np.interp(length, lengths, of_count) for of_count in seconds]
            for lengths, *seconds in self._columns
        ]
        none, one, most = (np.interp(batch, self._batches, of) for of in np.transpose(by_batch))
        return np.array([none, *np.linspace(one, most, self.most)])


class DraftLength:
    """Chooses the drafts of each round, up to `most`. Rounds draft nothing until they are timed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.times: RoundTimes | None = None
        self._accepted, self._judged = _PRIOR * _PRIOR_DRAFTS, _PRIOR_DRAFTS
        self._undrafted = 0

    def next_round(self, batch: int, length: float) -> int:
        """Drafts of the next round, of requests with a mean of `length` tokens."""
        if self.times is None:
            return 0
        seconds = self.times.at(batch, length // 64 * 64)
        drafts = best_drafts(seconds, self._accepted / self._judged)
        self._undrafted = 0 if drafts else self._undrafted % PROBE_ROUNDS + 1
        if self._undrafted == PROBE_ROUNDS:
            drafts = best_drafts(seconds, GOOD_ACCEPTANCE)
        return drafts

    def observe(self, drafts: int, accepted: Sequence[int]) -> tuple[int, int]:
        """Take the drafts accepted of each request in a round that drafted so many. Returns how
        many were judged, as their predecessors were accepted, and how many of those accepted."""
        hits = sum(accepted)
        judged = hits + sum(count < drafts for count in accepted)
        if drafts:
            self._accepted = _DECAY * self._accepted + hits
            self._judged = _DECAY * self._judged + judged
        return judged, hits
