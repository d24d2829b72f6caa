"""Chooses the active schedule: more aggressive ones as the measured acceptance tails allow it.

In: acceptance rates of a step's responses. Out: the schedule of the next step, and a record of
every move with the shares of tokens that caused it.

The tail percentile of a bin meets the target if at most 5 % of its tokens have a rate below the
target. Unlike the percentile, that share can be summed up over steps from two numbers per prompt,
and has a standard error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.rl.acceptance import (
    MIN_OBSERVATIONS,
    STANDARD_ERRORS,
    TAIL_SHARE,
    Acceptance,
    Share,
)
from sparrow_sglang.rl.config import LadderConfig
from sparrow_sglang.schedule import BudgetSchedule

WINDOW_STEPS = 20
"""Latest steps on the active schedule that count."""

_Counts = dict[int, list[tuple[int, int]]]
"""Per bin, for each prompt: tokens below the target, and all tokens."""


@dataclass(frozen=True)
class Move:
    """A change of schedule: both names, and per well-filled bin the share of tokens whose
    acceptance rate lies below `target`."""

    before: str
    after: str
    target: float
    shares: Mapping[int, float]

    def line(self) -> str:
        """The move as a line of the log."""
        bins = ", ".join(f"{share:.1%} in bin {index}" for index, share in self.shares.items())
        return (
            f"schedule {self.before} -> {self.after}: acceptance below {self.target} for {bins};"
            f" {TAIL_SHARE:.0%} allowed"
        )


class Ladder:
    """Schedules from the safest to the most aggressive, and which of them is active.

    Without schedules, rollouts are dense. What is measured on the active schedule is pooled over
    its latest `WINDOW_STEPS` steps. Bins count that are well filled: `min_tokens` tokens of
    `MIN_OBSERVATIONS` prompts.

    Back: as soon as the estimated share of a bin exceeds 5 %. On: once no bin has exceeded it in
    `patience` steps in a row, and every bin is below it by two standard errors. A schedule that has
    failed n times is tried again only after `patience` times 2^n such steps.
    """

    def __init__(self, schedules: Sequence[BudgetSchedule], settings: LadderConfig) -> None:
        self._schedules = tuple(schedules)
        self._settings = settings
        self._rung = 0
        self._good_steps = 0
        self._failures = [0] * len(self._schedules)
        self._window: list[_Counts] = []

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

    def observe(self, measured: Acceptance) -> Move | None:
        """Observe the acceptance rates of a step under the active schedule; returns any move."""
        target = self._settings.target
        self._window.append(measured.count_by_prompt(target))
        del self._window[:-WINDOW_STEPS]
        shares = self._shares()
        if not shares:
            return None
        rung = self._rung
        if any(share.value > TAIL_SHARE for share in shares.values()):
            self._good_steps = 0
            rung = max(0, rung - 1)
        else:
            self._good_steps += 1
            if self._may_go_on(shares):
                rung += 1
        if rung == self._rung:
            return None
        if rung < self._rung:
            self._failures[self._rung] += 1
        before, after = self._schedules[self._rung].name, self._schedules[rung].name
        self._rung, self._good_steps, self._window = rung, 0, []
        return Move(before, after, target, {index: share.value for index, share in shares.items()})

    def _may_go_on(self, shares: Mapping[int, Share]) -> bool:
        following = self._rung + 1
        if following == len(self._schedules):
            return False
        return self._good_steps >= self._settings.patience * 2 ** self._failures[following] and all(
            share.value + STANDARD_ERRORS * share.error <= TAIL_SHARE for share in shares.values()
        )

    def _shares(self) -> dict[int, Share]:
        """Shares of tokens below the target in the well-filled bins of the window."""
        shares = {}
        for index in sorted({index for counts in self._window for index in counts}):
            counts = [pair for step in self._window for pair in step.get(index, ())]
            if len(counts) < MIN_OBSERVATIONS:
                continue
            share = Share.of(counts)
            if share.tokens >= self._settings.min_tokens:
                shares[index] = share
        return shares

    def state_dict(self) -> dict[str, Any]:
        """The active rung, failures of each, and what was measured on it, as JSON values."""
        return {
            "rung": self._rung,
            "good_steps": self._good_steps,
            "failures": self._failures,
            "window": [list(counts.items()) for counts in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._rung, self._good_steps = state["rung"], state["good_steps"]
        self._failures = list(state["failures"])
        self._window = [
            {index: [(below, tokens) for below, tokens in pairs] for index, pairs in counts}
            for counts in state["window"]
        ]
