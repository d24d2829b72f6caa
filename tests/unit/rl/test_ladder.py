"""The ladder of schedules: when it moves, and what it says."""

import numpy as np
import pytest

from sparrow_sglang.rl.config import LadderConfig
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.schedule import BudgetSchedule

SCHEDULES = [BudgetSchedule.fixed(tokens) for tokens in (512, 256, 128)]
GOOD, BAD, SHORT = 0.95, 0.7, 0.1


def observe(ladder: Ladder, *tails: float):
    """Bins of 1,000 tokens, a tenth of them at the tail; SHORT ones have 50."""
    rates, positions = [], []
    for index, tail in enumerate(tails):
        size = 50 if tail == SHORT else 1000
        rates += [tail] * (size // 10) + [1.0] * (size - size // 10)
        positions += [index * 2048 + i for i in range(size)]
    return ladder.observe(np.array(rates), np.array(positions))


def ladder(**fields) -> Ladder:
    return Ladder(SCHEDULES, LadderConfig(**{"patience": 2, "min_tokens": 100} | fields))


def test_it_takes_patience_to_go_on_and_one_bad_bin_to_go_back():
    steps = ladder()
    names = []
    for tails in [
        (GOOD, GOOD),
        (GOOD, GOOD),  # the second in a row: a rung on
        (GOOD, GOOD),
        (GOOD, BAD),  # back
        (GOOD, GOOD),
        (GOOD, GOOD),
        (GOOD, GOOD),
        (GOOD, GOOD),
        (GOOD, GOOD),
        (GOOD, GOOD),  # nothing more aggressive than the last
        (BAD, GOOD),
        (BAD, GOOD),
        (BAD, GOOD),  # nothing safer than the first
    ]:
        observe(steps, *tails)
        names.append(int(steps.schedule.name.removeprefix("fixed-")))
    assert names == [512, 256, 256, 512, 512, 256, 256, 128, 128, 128, 256, 512, 512]


def test_a_move_carries_its_numbers():
    move = observe(ladder(patience=1), GOOD, 0.9)
    assert (move.before, move.after, move.target) == ("fixed-512", "fixed-256", 0.86)
    assert move.tails == pytest.approx({0: GOOD, 1: 0.9})
    assert move.line() == (
        "schedule fixed-512 -> fixed-256: target 0.86, tails bin 0 0.950, bin 1 0.900"
    )


def test_bins_with_few_tokens_say_nothing():
    steps = ladder(patience=1)
    assert observe(steps, SHORT) is None
    assert observe(steps, GOOD, SHORT).tails.keys() == {0}


def test_a_restored_ladder_stands_where_it_stood():
    first, second = ladder(), ladder()
    for _ in range(3):
        observe(first, GOOD)
    second.load_state_dict(first.state_dict())
    for steps in (first, second):
        assert steps.schedule == SCHEDULES[1]
        assert observe(steps, GOOD).after == "fixed-128"
