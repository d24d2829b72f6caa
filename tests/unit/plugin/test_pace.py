"""How many drafts a round takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow_sglang.plugin.lossless.pace import (
    GAIN,
    PROBE_ROUNDS,
    Costs,
    CostTable,
    Pace,
)

MOST = 8
# Drafts take a fifth of a dense step, as at long contexts, or nearly as long, as at short ones.
LONG, SHORT = Costs(0.2, 1.2, 1.0), Costs(0.98, 1.1, 1.0)


def simulated(costs: Costs, drafts: int, acceptance: float) -> float:
    """Tokens per second, drawn draft by draft."""
    draw = np.random.default_rng(0)
    rounds = 20000
    accepted = (draw.random((rounds, drafts)) < acceptance).cumprod(1).sum() if drafts else 0
    seconds = drafts * costs.draft + costs.verify if drafts else costs.dense
    return float((accepted + rounds) / rounds / seconds)


@pytest.mark.parametrize("costs", [LONG, SHORT])
@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.97])
def test_no_other_number_gives_more_tokens(costs: Costs, acceptance: float) -> None:
    rates = [simulated(costs, drafts, acceptance) for drafts in range(MOST + 1)]
    for current in range(MOST + 1):
        chosen = costs.best_drafts(acceptance, MOST, current)
        assert rates[chosen] >= max(rates) / GAIN * 0.98
    if costs is SHORT and acceptance < 0.97:
        assert costs.best_drafts(acceptance, MOST, MOST) == 0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=50))
def test_two_ranks_agree(rounds: list[tuple[int, int]]) -> None:
    paces = [Pace(MOST) for _ in range(2)]
    for pace in paces:
        pace.costs = CostTable([(1, 1024, *SHORT), (1, 4096, *LONG)])
    for accepted, batch in rounds:
        drafts = {pace.next_round(batch, 2000) for pace in paces}
        assert len(drafts) == 1
        for pace in paces:
            pace.observe([min(accepted, *drafts)] * batch)


def test_rounds_follow_the_acceptance_and_are_probed() -> None:
    pace = Pace(MOST)
    assert pace.next_round(1, 100) == MOST
    pace.observe([3])
    pace.costs = CostTable([(1, 1024, *Costs(0.6, 1.1, 1.0))])

    def rounds(acceptance: float, count: int) -> list[int]:
        draw = np.random.default_rng(1)
        chosen = []
        for _ in range(count):
            drafts = pace.next_round(1, 100)
            pace.observe([int((draw.random(drafts) < acceptance).cumprod().sum())])
            chosen.append(drafts)
        return chosen

    bad = rounds(0.1, 400)
    assert set(bad[100:]) > {0} and 0 < sum(map(bool, bad[100:])) <= 300 // PROBE_ROUNDS + 1
    # Probes find out that drafts are accepted again.
    assert min(rounds(1.0, 2000)[-10:]) == MOST
    # Where drafts cannot pay, nothing is probed.
    pace.costs = CostTable([(1, 1024, *Costs(1.1, 1.2, 1.0))])
    assert not any(rounds(1.0, 200))


def test_costs_between_those_measured() -> None:
    rows = [(1, 1000, 1, 2, 3), (1, 3000, 3, 4, 5), (16, 1000, 11, 12, 13)]
    table = CostTable(rows)
    assert table.at(1, 2000) == Costs(2, 3, 4)
    assert table.at(1, 9000) == Costs(3, 4, 5) and table.at(64, 10) == Costs(11, 12, 13)
    assert table.at(6, 1000) == pytest.approx(Costs(*(1 / 3 * 10 + n for n in (1, 2, 3))))
