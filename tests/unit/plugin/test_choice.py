"""Which rounds are chosen."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow_sglang.planning.rounds import DENSE, NARROW, Plan, expected_tokens, plans
from sparrow_sglang.plugin.lossless.choice import (
    GAIN,
    PROBE_ROUNDS,
    RoundChoice,
    RoundTimes,
    best,
)
from sparrow_sglang.plugin.scheduler import timing

WIDTH = 9
PLANS = plans(WIDTH, looks_up=True)


def seconds(draft: float, verification: float, narrow: float | None = None) -> dict[Plan, float]:
    """Of rounds, where a dense step takes 1."""
    dense_pass = {1: 1.0, NARROW: narrow or verification, WIDTH: verification}
    return {plan: plan.drafts * draft + dense_pass[plan.rows] for plan in PLANS}


def times_of(by_length: dict[int, dict[Plan, float]], launch_s: float = 1e-3) -> RoundTimes:
    measured = RoundTimes.measured(PLANS)
    rows = [(1, n, *map(of.get, measured)) for n, of in by_length.items()]
    return RoundTimes(PLANS, rows, launch_s)


# Sparse drafts are cheap, as at long contexts, or not, as at short ones, or nothing pays.
LONG, SHORT, NEVER = seconds(0.2, 1.2, 1.1), seconds(0.98, 1.5, 1.1), seconds(1.1, 2.5, 2.5)


def drawn(plan: Plan, sparse: float, lookups: list[float], rounds: int) -> np.ndarray:
    """Accepted drafts of rounds, draft by draft."""
    rates = np.array([sparse] * plan.drafts + lookups[: plan.lookups])
    draw = np.random.default_rng(0).random((rounds, len(rates)))
    return (draw < rates).cumprod(1).sum(1)


@pytest.mark.parametrize("costs", [LONG, SHORT, NEVER])
@pytest.mark.parametrize(("sparse", "looked_up"), [(0.97, 0.5), (0.97, 0.05), (0.5, 0.5), (0.1, 0)])
def test_no_other_round_gives_more_tokens(costs, sparse, looked_up) -> None:
    lookups = [looked_up] * (WIDTH - 1)
    rates = {p: (drawn(p, sparse, lookups, 20000).mean() + 1) / costs[p] for p in PLANS}
    assert rates[best(costs, sparse, lookups)] >= max(rates.values()) / GAIN * 0.98


def test_kinds_of_rounds() -> None:
    """Which pays is known in these cases."""
    lookups = [0.5] * (WIDTH - 1)
    assert best(SHORT, 0.95, lookups) == Plan(0, NARROW - 1, NARROW)
    assert best(LONG, 0.95, [0.0] * WIDTH).drafts == WIDTH - 1
    behind = best(LONG, 0.8, lookups)
    assert behind.drafts and behind.lookups
    assert best(NEVER, 0.95, lookups) == DENSE
    # Two per cent, 1.875 tokens in 1.84 steps, are within what times vary.
    assert best(seconds(5, 2.5, 1.84), 0.95, lookups) == DENSE
    # Without lookups the rows that drafts leave are verified for nothing.
    assert {plan.lookups for plan in plans(WIDTH, looks_up=False)} == {0}
    assert min(plan.drafts for plan in plans(WIDTH, looks_up=False)[1:]) == 1
    assert plans(2, looks_up=True) == [DENSE, Plan(0, 1, 2), Plan(1, 0, 2)]


def test_the_host_is_the_limit_of_small_models() -> None:
    """By the device's times of a 1.5B model at one request all rounds take about as long; two
    narrow ones share a turn of SGLang's loop, as the host does not."""
    verifications = {1: 1.85e-3, NARROW: 2.1e-3, WIDTH: 2.15e-3}
    times = times_of({1024: {p: 2e-3 * p.drafts + verifications[p.rows] for p in PLANS}})
    at = times.at(1, 1024)
    assert at[Plan(0, 8, WIDTH)] > 3e-3
    assert best(at, 0.9, [0.5] * (WIDTH - 1)) == Plan(0, NARROW - 1, NARROW)
    # On a faster host a dense step takes no longer than on the device.
    assert best(at, 0.1, [0.02] * (WIDTH - 1)) == DENSE
    # If they do not, as with log-probs, the wide one gives more.
    alone = times.at(1, 1024, in_pairs=False)
    assert alone[Plan(0, NARROW - 1, NARROW)] == alone[Plan(0, 8, WIDTH)]
    choice = RoundChoice(WIDTH, looks_up=True)
    choice.times = times
    assert choice.next_round(1, 1024, False).rows == WIDTH > choice.next_round(1, 1024).rows
    # The host launches each sparse step.
    short = times_of({1024: {p: 1e-4 * p.drafts + verifications[p.rows] for p in PLANS}})
    plans_of_wide = [Plan(0, 8, WIDTH), Plan(4, 4, WIDTH), Plan(8, 0, WIDTH)]
    launched = [short.at(1, 1024)[plan] for plan in plans_of_wide]
    assert np.diff(launched) == pytest.approx([4 * (launched[0] - 2.2e-3)] * 2)
    # A host twice as fast limits none of these.
    verified = {p: verifications[p.rows] for p in PLANS}
    wide = Plan(0, 8, WIDTH)
    slow, fast = (times_of({1024: verified}, s).at(1, 1024)[wide] for s in (1e-3, 5e-4))
    assert fast == verified[wide] < slow
    # A large model's are limited by the device.
    assert times_of({1024: LONG}).at(1, 1024) == pytest.approx(LONG)


def test_the_host_waits_for_no_device_while_its_launches_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    takes, runs = (lambda s: now.append(now[-1] + s)), iter([3.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: takes(5.0))
    assert timing.least_launch_seconds(lambda: takes(next(runs))) == 1.0


def test_expected_tokens() -> None:
    assert expected_tokens(DENSE, 0.9, [0.5]) == 1
    # 1 + 0.9 + 0.9^2 + 0.9^2 * 0.5 + 0.9^2 * 0.5 * 0.4
    assert expected_tokens(Plan(2, 2, 9), 0.9, [0.5, 0.4, 0.3]) == pytest.approx(3.277)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=50))
def test_two_ranks_agree(rounds: list[tuple[int, int]]) -> None:
    ranks = [RoundChoice(WIDTH, looks_up=True) for _ in range(2)]
    for choice in ranks:
        choice.times = times_of({1024: SHORT, 4096: LONG})
    for accepted, batch in rounds:
        [plan] = {choice.next_round(batch, 2000) for choice in ranks}
        for choice in ranks:
            choice.observe(plan, [min(accepted, plan.drafts + plan.lookups)] * batch)


def played(choice: RoundChoice, sparse: float, looked_up: float, count: int) -> list[Plan]:
    """Rounds of a request whose drafts are accepted at these rates."""
    chosen = []
    draw = np.random.default_rng(1)
    for _ in range(count):
        plan = choice.next_round(1, 100)
        rates = np.array([sparse] * plan.drafts + [looked_up] * plan.lookups)
        choice.observe(plan, [int((draw.random(len(rates)) < rates).cumprod().sum())])
        chosen.append(plan)
    return chosen


def test_drafts_are_judged_up_to_the_first_that_is_rejected() -> None:
    choice = RoundChoice(WIDTH, looks_up=True)
    # Of three sparse drafts and two lookups all, four, one and none are accepted.
    counts = choice.observe(Plan(3, 2, 6), [5, 4, 1, 0])
    assert counts == [(3 * 2 + 2 + 1, 3 * 2 + 1), (4, 3)]


def test_rounds_follow_the_acceptance_and_each_kind_is_probed() -> None:
    choice = RoundChoice(WIDTH, looks_up=True)
    assert choice.next_round(1, 100) == DENSE
    choice.times = times_of({1024: LONG})
    # Nothing is accepted: dense steps, and a probe of each kind now and then.
    idle = played(choice, 0.05, 0.02, 1000)[400:]
    probes = [plan for plan in idle if plan != DENSE]
    assert any(plan.drafts for plan in probes) and any(plan.lookups for plan in probes)
    assert len(probes) <= 2 * (600 // PROBE_ROUNDS + 1)
    # Probes find out that drafts of a kind are accepted again.
    assert min(plan.drafts for plan in played(choice, 1.0, 0.02, 4000)[-10:]) == WIDTH - 1
    choice.times = times_of({1024: SHORT})
    looking = played(choice, 0.1, 0.7, 4000)[-100:]
    assert sum(plan.lookups > 0 for plan in looking) > 90
    # Where drafts cannot pay, nothing is probed.
    idle_choice = RoundChoice(WIDTH, looks_up=True)
    idle_choice.times = times_of({1024: NEVER})
    assert set(played(idle_choice, 1.0, 0.5, 200)) == {DENSE}


def test_one_bad_round_does_not_end_drafts() -> None:
    """At one request a round judges few drafts, so that the recent ones are many rounds."""
    choice = RoundChoice(WIDTH, looks_up=True)
    choice.times = times_of({1024: SHORT})
    played(choice, 0.9, 0.5, 300)
    choice.observe(Plan(0, 3, 4), [0])
    assert choice.next_round(1, 100).lookups


@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("width", [2, 3, 9])
def test_times_between_those_measured(width: int, looks_up: bool) -> None:
    """Linear in the number of sparse drafts, batch and length."""
    known = plans(width, looks_up)

    def exact(batch: float, length: float, plan: Plan) -> float:
        return batch + length / 1000 + 2 * plan.drafts + 10 * plan.rows

    measured = RoundTimes.measured(known)
    assert len(measured) <= 5
    cases = [(1, 1000), (1, 3000), (16, 1000), (16, 3000)]
    times = RoundTimes(
        known, [(b, n, *(exact(b, n, plan) for plan in measured)) for b, n in cases], 0.0
    )
    for asked, inside in (((1, 2000), (1, 2000)), ((6, 9000), (6, 3000)), ((64, 10), (16, 1000))):
        for plan in known:
            assert times.at(*asked)[plan] == pytest.approx(exact(*inside, plan))
