"""How many rows of a request a step verifies, by what steps have taken and which drafts were right.

In: the time and the right drafts of each step, a few steps late. Out: the rows of the next one.
"""

import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Sequence

_FIRST, _LATEST = 2, 5
"""Steps of each number of rows before one is chosen, and the latest ones, whose shortest time
counts: others were kept waiting."""
_SPENT = 0.0075
"""Share of the time that goes into steps of other rows, which are measured that way."""
_GUESSED, _AVERAGED = 4, 32
"""Steps of a request that the first guess of the share of right drafts counts as, a low one, and
steps over which that share is averaged."""


class RowsChoice:
    """Chooses the number of rows with which a token takes the least time.

    It begins with one row, and may spend the time of one step on trials of others at once, further
    ones as `_SPENT` says. A batch of the same size up to the next power of two takes about the same
    time; what is known of drafts holds for all requests.

    Args:
        widths: numbers of rows to choose from, ascending; the first is 1, for no drafts.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = widths
        # How often each draft is right if those before it are; guessed at first.
        self._right = [0.25, *[0.5] * (widths[-1] - 2)][: widths[-1] - 1]
        self._seen = [_GUESSED] * len(self._right)
        # By batch size: milliseconds of the latest steps by rows, and the time saved for trials.
        self._times: dict[int, dict[int, deque[float]]] = defaultdict(
            lambda: {rows: deque(maxlen=_LATEST) for rows in widths}
        )
        self._saved: dict[int, float] = defaultdict(lambda: 1.0)
        self._last_taken: dict[tuple[int, int], int] = defaultdict(int)
        self._steps = 0

    def choose(self, batch: int) -> int:
        """Rows of each of `batch` requests in the next step."""
        self._steps += 1
        size = _size(batch)
        chosen = self._next(size)
        self._last_taken[size, chosen] = self._steps
        return chosen

    def _next(self, size: int) -> int:
        oldest = min(self.widths, key=lambda rows: self._last_taken[size, rows])
        if any(len(times) < _FIRST for times in self._times[size].values()):
            # In turn, so that what the first steps wait for counts for all.
            return oldest
        cost = {rows: self._cost(size, rows) for rows in self.widths}
        best = min(self.widths, key=cost.__getitem__)
        self._saved[size] = min(self._saved[size] + _SPENT, 1.0)
        loss = (cost[oldest] / cost[best] - 1) * self._tokens(oldest)
        if self._saved[size] < loss:
            return best
        self._saved[size] -= loss
        return oldest

    def measured(self, batch: int, rows: int, ms: float | None, right: Sequence[int]) -> None:
        """Take note of a step of `batch` requests, and how many drafts of each were right.

        `ms` is None where something else than a step went before it.
        """
        if ms is not None:
            self._times[_size(batch)][rows].append(ms)
        for place in range(rows - 1):
            if not (reached := [number for number in right if number >= place]):
                break
            share = sum(number > place for number in reached) / len(reached)
            weight = len(reached) / (min(self._seen[place], _AVERAGED) + len(reached))
            self._right[place] += weight * (share - self._right[place])
            self._seen[place] += len(reached)

    def _tokens(self, rows: int) -> float:
        """Tokens that a step gives a request."""
        return 1 + sum(itertools.accumulate(self._right[: rows - 1], operator.mul))

    def _cost(self, size: int, rows: int) -> float:
        """Milliseconds of a token."""
        return min(self._times[size][rows]) / self._tokens(rows)


def _size(batch: int) -> int:
    return 2 ** math.ceil(math.log2(batch))
