"""Chooses the active schedule: more aggressive ones as the measured acceptance tails allow it.

In: acceptance rates of a step's responses. Out: the schedule of the next step, and a record of
every move with the tail percentiles that caused it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import BIN_TOKENS
from sparrow_sglang.rl.config import LadderConfig
from sparrow_sglang.rl.metrics import tail_percentile
from sparrow_sglang.schedule import BudgetSchedule


@dataclass(frozen=True)
class Move:
    """A change of schedule: both names, and the tail percentile of each well-filled bin."""

    before: str
    after: str
    target: float
    tails: Mapping[int, float]

    def line(self) -> str:
        """The move as a line of the log."""
        bins = ", ".join(f"bin {index} {tail:.3f}" for index, tail in self.tails.items())
        return f"schedule {self.before} -> {self.after}: target {self.target}, tails {bins}"


class Ladder:
    """Schedules from the safest to the most aggressive, and which of them is active.

    Without schedules, rollouts are dense.
    """

    def __init__(self, schedules: Sequence[BudgetSchedule], settings: LadderConfig) -> None:
        self._schedules = tuple(schedules)
        self._settings = settings
        self._rung = 0
        self._good_steps = 0

    @property
    def first(self) -> BudgetSchedule | None:
        """The safest schedule, with which a run begins."""
        return next(iter(self._schedules), None)

    @property
    def schedule(self) -> BudgetSchedule | None:
        """The active schedule."""
        return self._schedules[self._rung] if self._schedules else None

    @property
    def schedules(self) -> dict[str, BudgetSchedule]:
        """All of them, by name."""
        return {schedule.name: schedule for schedule in self._schedules}

    def observe(self, rates: NDArray[np.float64], positions: NDArray[np.int64]) -> Move | None:
        """Observe a step's acceptance rates [N] at sequence positions [N]; returns any move.

        The ladder moves to the next more aggressive schedule once every well-filled bin has met the
        target in `patience` steps in a row, and back by one as soon as a bin falls below it.
        """
        bins = positions // BIN_TOKENS
        tails = {
            int(index): tail_percentile(rates[bins == index])
            for index in np.unique(bins)
            if (bins == index).sum() >= self._settings.min_tokens
        }
        if not tails:
            return None
        met = min(tails.values()) >= self._settings.target
        self._good_steps = self._good_steps + 1 if met else 0
        rung = self._rung
        if not met:
            rung = max(0, rung - 1)
        elif self._good_steps >= self._settings.patience:
            rung = min(len(self._schedules) - 1, rung + 1)
        if rung == self._rung:
            return None
        before, after = self._schedules[self._rung].name, self._schedules[rung].name
        self._rung, self._good_steps = rung, 0
        return Move(before, after, self._settings.target, tails)

    def state_dict(self) -> dict[str, Any]:
        """The active rung, and how many steps in a row have met the target on it."""
        return {"rung": self._rung, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._rung, self._good_steps = state["rung"], state["good_steps"]
