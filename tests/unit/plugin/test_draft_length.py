"""How many drafts a round takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow_sglang.plugin.lossless.draft_length import (
    GAIN,
    PROBE_ROUNDS,
    DraftLength,
    RoundTimes,
    best_drafts,
)

MOST = 8


def seconds(draft: float, verification: float) -> list[float]:
    """Of rounds of 0 to MOST drafts, where a dense step takes 1."""
    return [1.0, *(number * draft + verification for number in range(1, MOST + 1))]


def times_of(by_length: dict[int, list[float]]) -> RoundTimes:
    return RoundTimes(MOST, [(1, n, of[0], of[1], of[-1]) for n, of in by_length.items()])


# Drafts take a fifth of a dense step, as at long contexts, or nearly as long, as at short ones.
LONG, SHORT = seconds(0.2, 1.2), seconds(0.98, 1.1)


def simulated(of_round: float, drafts: int, acceptance: float) -> float:
    """Tokens per second, drawn draft by draft."""
    draw = np.random.default_rng(0)
    rounds = 20000
    accepted = (draw.random((rounds, drafts)) < acceptance).cumprod(1).sum() if drafts else 0
    return float((accepted + rounds) / rounds / of_round)


@pytest.mark.parametrize("costs", [LONG, SHORT])
@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.97])
def test_no_other_number_gives_more_tokens(costs: list[float], acceptance: float) -> None:
    rates = [simulated(costs[drafts], drafts, acceptance) for drafts in range(MOST + 1)]
    assert rates[best_drafts(costs, acceptance)] >= max(rates) / GAIN * 0.98
    if costs is SHORT and acceptance < 0.97:
        assert best_drafts(costs, acceptance) == 0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=50))
def test_two_ranks_agree(rounds: list[tuple[int, int]]) -> None:
    lengths = [DraftLength(MOST) for _ in range(2)]
    for length in lengths:
        length.times = times_of({1024: SHORT, 4096: LONG})
    for accepted, batch in rounds:
        drafts = {length.next_round(batch, 2000) for length in lengths}
        assert len(drafts) == 1
        for length in lengths:
            length.observe(*drafts, [min(accepted, *drafts)] * batch)


def test_rounds_follow_the_acceptance_and_are_probed() -> None:
    length = DraftLength(MOST)
    assert length.next_round(1, 100) == 0
    # The draft after three accepted ones was rejected, that after eight does not exist.
    assert length.observe(MOST, [3, 0, 8]) == (13, 11)
    length.times = times_of({1024: seconds(0.6, 1.1)})

    def rounds(acceptance: float, count: int) -> list[int]:
        draw = np.random.default_rng(1)
        chosen = []
        for _ in range(count):
            drafts = length.next_round(1, 100)
            length.observe(drafts, [int((draw.random(drafts) < acceptance).cumprod().sum())])
            chosen.append(drafts)
        return chosen

    bad = rounds(0.1, 400)
    assert set(bad[100:]) > {0} and 0 < sum(map(bool, bad[100:])) <= 300 // PROBE_ROUNDS + 1
    # Probes find out that drafts are accepted again.
    assert min(rounds(1.0, 2000)[-10:]) == MOST
    # Where drafts cannot pay, nothing is probed.
    length.times = times_of({1024: seconds(1.1, 1.2)})
    assert not any(rounds(1.0, 200))


@pytest.mark.parametrize("most", [1, 3])
def test_times_between_those_measured(most: int) -> None:
    rows = [(1, 1000, 1, 2, 4), (1, 3000, 3, 4, 6), (16, 1000, 11, 12, 14)]
    times = RoundTimes(most, rows if most > 1 else [(*row[:4], row[3]) for row in rows])
    counts = np.array([0, 1, 2, 3][: most + 1])
    assert times.at(1, 2000) == pytest.approx(2 + counts)
    assert times.at(1, 9000) == pytest.approx(3 + counts)
    assert times.at(64, 10) == pytest.approx(11 + counts)
    assert times.at(6, 1000) == pytest.approx(1 / 3 * 10 + 1 + counts)
