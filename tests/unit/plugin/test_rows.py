"""The rows that a step verifies follow what steps take, and how often drafts are right."""

import random
from collections import Counter, deque

import pytest

from sparrow_sglang.plugin.drafting.rows import RowsChoice

WIDTHS = [1, 2, 4]


def simulate(
    choice: RowsChoice, right: float, times: dict[int, float], batch: int = 1, steps: int = 4000
) -> tuple[float, Counter]:
    """Time a token and steps by rows, of drafts that are right at the rate `right`."""
    draw = random.Random(0)
    late, chosen = deque(), Counter()
    seconds = tokens = 0.0
    for _ in range(steps):
        rows = choice.choose(batch)
        correct = [
            next((place for place in range(rows - 1) if draw.random() >= right), rows - 1)
            for _ in range(batch)
        ]
        chosen[rows] += 1
        seconds += times[rows]
        tokens += 1 + sum(correct) / batch
        late.append((batch, rows, times[rows] * draw.uniform(0.9, 1.1), correct))
        # As the overlap scheduler processes results.
        if len(late) > 2:
            choice.measured(*late.popleft())
    return seconds / tokens, chosen


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("right", "times", "best"),
    [
        (0.0, {1: 1.0, 2: 1.05, 4: 1.25}, 1),
        (0.02, {1: 1.0, 2: 1.1, 4: 1.25}, 1),
        (0.3, {1: 1.0, 2: 1.1, 4: 1.25}, 2),
        (0.6, {1: 1.0, 2: 1.1, 4: 1.25}, 4),
        (0.6, {1: 1.0, 2: 2.0, 4: 4.0}, 1),
    ],
)
def test_the_cheapest_rows_are_found(right, times, best, batch):
    time, chosen = simulate(RowsChoice(WIDTHS), right, times, batch)
    assert chosen.most_common(1)[0][0] == best
    cheapest = min(times[rows] / sum(right**place for place in range(rows)) for rows in WIDTHS)
    assert time < (1.02 if best == 1 else 1.03) * cheapest


@pytest.mark.parametrize(
    ("batch", "times"),
    [
        (1, {1: 2.52, 2: 2.84, 4: 3.49}),
        (4, {1: 2.90, 2: 3.29, 4: 4.01}),
        (16, {1: 4.13, 2: 4.85, 4: 6.04}),
    ],
)
def test_steps_of_qwen3_on_an_h100(batch, times):
    """At 32K cached tokens; two rows are estimated. Nothing can be drafted at first."""
    choice = RowsChoice(WIDTHS)
    first, _ = simulate(choice, 0.0, times, batch, steps=150)
    assert first < 1.04 * times[1]
    later, chosen = simulate(choice, 0.0, times, batch, steps=2000)
    assert later < 1.02 * times[1] and chosen[1] > 1850
    assert simulate(choice, 0.7, times, batch, steps=500)[1][4] > 300


def test_a_change_of_the_text_or_of_the_batch_is_noticed():
    choice, times = RowsChoice(WIDTHS), {1: 1.0, 2: 1.1, 4: 1.25}
    simulate(choice, 0.0, times)
    assert simulate(choice, 0.7, times)[1][4] > 3000
    assert simulate(choice, 0.0, times)[1][1] > 3000
    # A large batch takes longer with more rows, whatever a small one does.
    assert simulate(choice, 0.3, {1: 1.0, 2: 1.8, 4: 3.0}, batch=64)[1][1] > 3000
    assert simulate(choice, 0.7, times)[1][4] > 3000


def test_one_number_of_rows_leaves_no_choice():
    assert simulate(RowsChoice([4]), 0.0, {4: 1.0}, steps=20)[1] == {4: 20}
