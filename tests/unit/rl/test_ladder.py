"""The ladder of schedules: when it moves, and what it says."""

import json

import numpy as np
import pytest

from sparrow_sglang.rl.acceptance import Acceptance
from sparrow_sglang.rl.config import LadderConfig
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.types import Rollout
from sparrow_sglang.schedule import BudgetSchedule

SCHEDULES = [BudgetSchedule.fixed(tokens) for tokens in (512, 256, 128)]
GOOD, BAD = 0.02, 0.2
"""Shares of tokens with a rate below the target."""
TOKENS = 200


def step(*shares: float, prompts: int = 8, tokens: int = TOKENS) -> Acceptance:
    """One response to each of `prompts` prompts, with `tokens` tokens in each bin, of which a share
    is below the target."""
    rollouts = [
        Rollout(f"p{i}", 0, (1,), (7,), np.zeros(1), "stop", "0", "s", "") for i in range(prompts)
    ]
    below = [int(share * tokens) for share in shares]
    rates = [[0.5] * count + [1.0] * (tokens - count) for count in below]
    bins = np.repeat(np.arange(len(shares)), tokens)
    return Acceptance(
        tuple(rollouts),
        np.tile(np.concatenate(rates), prompts),
        np.tile(bins, prompts),
        np.repeat(np.arange(prompts), len(bins)),
    )


def ladder(**fields) -> Ladder:
    return Ladder(SCHEDULES, LadderConfig(**{"patience": 2, "min_tokens": 1000} | fields))


def names(steps: Ladder, measured) -> list[int]:
    found = []
    for one in measured:
        steps.observe(one)
        found.append(int(steps.schedule.name.removeprefix("fixed-")))
    return found


def test_it_takes_patience_to_go_on_and_one_bad_bin_to_go_back():
    good, bad = step(GOOD, GOOD), step(GOOD, BAD)
    steps = ladder()
    assert names(steps, [good, good, good, good]) == [512, 256, 256, 128]
    # There is nothing more aggressive than the last, and nothing safer than the first.
    assert names(steps, [good, good, good, step(BAD), step(BAD), step(BAD)]) == [
        128, 128, 128, 256, 512, 512
    ]  # fmt: skip
    assert names(ladder(patience=1), [good, bad]) == [256, 512]


def test_a_schedule_that_fails_is_tried_ever_more_rarely():
    """The first schedule meets the target and the second never does."""
    steps, visits = ladder(patience=3), []
    for number in range(2000):
        failing = steps.schedule != SCHEDULES[0]
        visits += [number] if failing else []
        steps.observe(step(BAD if failing else GOOD))
    assert 5 <= len(visits) <= 10
    waits = np.diff(visits)
    assert (waits[1:] >= 1.8 * waits[:-1]).all()


def test_neither_one_response_nor_one_short_bin_decides():
    for measured in (step(GOOD, prompts=1, tokens=5000), step(GOOD, tokens=100)):
        steps = ladder(patience=1)
        assert steps.observe(measured) is None and steps.schedule == SCHEDULES[0]
    # Eight steps of one response each do, if their prompts differ from one another no more.
    steps = ladder(patience=1)
    assert names(steps, [step(GOOD, prompts=1)] * 8) == [512] * 7 + [256]


@pytest.mark.parametrize(("tail_share", "most"), [(0.05, 0.06), (0.03, 1.0)])
def test_going_on_is_a_test_at_95_percent(tail_share, most):
    """Prompts differ, and the true share is exactly the limit: few go on in their first step."""
    draw, moved = np.random.default_rng(0), 0
    for _ in range(200):
        shares = tail_share * draw.gamma(4, 1 / 4, 40)
        measured = step(0.0, prompts=40, tokens=200)
        measured.rates[:] = 1.0
        for prompt, share in enumerate(shares):
            own = np.flatnonzero(measured.owners == prompt)
            measured.rates[own[: int(round(share * 200))]] = 0.5
        moved += ladder(patience=1).observe(measured) is not None
    assert moved / 200 <= most
    assert (moved / 200 > 0.9) == (most == 1.0)


def test_a_move_carries_its_numbers():
    move = ladder(patience=1).observe(step(GOOD, 0.03))
    assert (move.before, move.after, move.target) == ("fixed-512", "fixed-256", 0.86)
    assert move.shares == pytest.approx({0: GOOD, 1: 0.03})
    assert move.line() == (
        "schedule fixed-512 -> fixed-256: acceptance below 0.86 for 2.0% in bin 0, 3.0% in bin 1;"
        " 5% allowed"
    )


def test_a_restored_ladder_stands_where_it_stood():
    first, second = ladder(), ladder()
    names(first, [step(GOOD), step(GOOD), step(BAD), *[step(GOOD)] * 3])
    # A checkpoint keeps the state as JSON.
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for steps in (first, second):
        assert steps.schedule == SCHEDULES[0]
        assert steps.observe(step(GOOD)).after == "fixed-256"
