"""The budgets that calibration chooses, against brute force."""

import random

import numpy as np
import pytest

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.choice import MeasuredTails, bin_tails, choose
from sparrow_sglang.calibration.results import check_schedule, make_schedule
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.mismatch.tail import BinTail
from sparrow_sglang.schedules.schedule import BudgetSchedule

BIN = 64
UNDER = BudgetSchedule.fixed(320)


def tail(index: int, low: float, tokens: int = 1000) -> BinTail:
    """A bin whose tail has its lower confidence end at `low`."""
    return BinTail(index, index * BIN, (index + 1) * BIN, tokens, low + 0.1, low, 1.0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_cheapest_that_holds_with_all_above_it_and_never_falls(seed: int) -> None:
    draw = random.Random(seed)
    budgets, bins, target = [64, 96, 128, 192], 6, 0.8
    lows = {b: [draw.random() for _ in range(bins)] for b in budgets}
    tails = {b: {i: tail(i, lows[b][i]) for i in range(bins)} for b in budgets}
    chosen = choose(MeasuredTails(tails, BIN, 500), target, bins)
    highest = 0
    for i, choice in enumerate(chosen):
        # With far too small a budget a model repeats itself, and both distributions agree on it.
        end = (i + 1) * BIN
        least = [b for b in budgets if all(lows[c][i] >= target for c in budgets if b <= c < end)]
        own = min([*least, end])
        highest = max(highest, own)
        assert (choice["needed_tokens"], choice["budget_tokens"]) == (own, highest)


def test_a_budget_whose_tail_has_no_lower_bound_is_passed_over() -> None:
    def chosen(unbounded: float) -> int:
        tails = {b: {4: tail(4, low)} for b, low in ((64, 0.7), (96, 0.81), (192, 0.85))}
        tails[128] = {4: BinTail(4, 4 * BIN, 5 * BIN, 1000, unbounded, 0.0, 1.0, 1)}
        return choose(MeasuredTails(tails, BIN, 500), 0.8, 5)[4]["budget_tokens"]

    assert (chosen(0.9), chosen(0.79)) == (96, 192)


def test_bins_with_few_tokens_are_extrapolated_and_say_so() -> None:
    tails = {
        64: {1: tail(1, 0.9, tokens=10), 2: tail(2, 0.9), 3: tail(3, 0.2), 4: tail(4, 0.9, 10)},
        128: {2: tail(2, 0.95), 3: tail(3, 0.9)},
    }
    chosen = choose(MeasuredTails(tails, BIN, 500), 0.8, 6)
    assert [c["basis"] for c in chosen] == [*["extrapolated"] * 2, *["measured"] * 2,
                                         *["extrapolated"] * 2]  # fmt: skip
    # Bins before a measured one get its budget; those after the last one, in proportion to
    # position, 128 * 5/4 and 128 * 6/4.
    assert [c["budget_tokens"] for c in chosen] == [64, 64, 64, 128, 192, 192]


def test_the_last_bin_of_a_schedule_has_no_end() -> None:
    rates = [Tokens(p, np.array([70, 130, 200, 9000]), np.full(4, 0.5)) for p in "abcdefghijkl"]
    assert {i: one.tokens for i, one in bin_tails(rates, BIN, 16, 3).items()} == {1: 12, 2: 36}
    assert len(bin_tails(rates, BIN, 16)) == 4


def test_a_schedule_without_a_measured_bin_is_not_calibrated() -> None:
    origin = {"model": "m", "model_match": {}}
    tails = {64: {3: tail(3, 0.5)}, 96: {3: tail(3, 0.6), 4: tail(4, 0.1)}}
    with pytest.raises(CalibrationError):
        make_schedule("m", 0.8, MeasuredTails(tails, BIN, 500), UNDER, 320, origin)
    assert make_schedule("m", 0.55, MeasuredTails(tails, BIN, 500), UNDER, 320, origin).calibrated


def test_a_dense_bin_is_read_whole() -> None:
    tails = {64: {3: tail(3, 0.9), 4: tail(4, 0.1)}, 192: {4: tail(4, 0.2)}}
    origin = {"model": "m", "model_match": {}}
    schedule = make_schedule("m", 0.8, MeasuredTails(tails, BIN, 500), UNDER, 320, origin)
    assert schedule.provenance["bins"][4]["basis"] == "dense"
    for cached in range(4 * BIN, 5 * BIN):
        assert schedule.tokens_read(cached) == cached
    rates = [Tokens(prompt, np.full(600, 300), np.full(600, 0.5)) for prompt in "abcdefghijkl"]
    assert check_schedule(schedule, 0.8, rates, 500)["bins"][4]["verdict"] == "dense"
    cheaper = BudgetSchedule(**schedule.model_dump() | {"budget_tokens": (64, 64, 64, 64, 192)})
    assert check_schedule(cheaper, 0.8, rates, 500)["bins"][4]["verdict"] == "fails"


@pytest.mark.parametrize(
    ("low_in_some", "verdict"), [(8, "holds"), (12, "undecided"), (80, "fails")]
)
def test_a_tail_below_the_target_fails_a_check_only_if_its_interval_does(
    low_in_some: int, verdict: str
) -> None:
    """In 6 of 12 prompts `low_in_some` of 100 tokens have a low rate, so that 5 % have in 10."""
    schedule = BudgetSchedule.fixed(64)
    rates = [
        Tokens(
            f"{n}", np.full(100, 300), np.where(np.arange(100) < low_in_some * (n % 2), 0.5, 0.9)
        )
        for n in range(12)
    ]
    report = check_schedule(schedule, 0.8, rates, 500)
    # All in one bin, although the file of a fixed budget has bins of a page.
    assert [row["verdict"] for row in report["bins"]] == [verdict]
    assert report["holds"] == (verdict == "holds")


def test_a_check_without_a_judged_token_does_not_hold() -> None:
    dense = BudgetSchedule(name="d", page_size=16, bin_tokens=BIN, budget_tokens=(64, 128, 192))
    few = [Tokens("a", np.full(10, 200), np.ones(10))]
    for generations in ([], few):
        report = check_schedule(dense, 0.8, generations, 500)
        assert report["holds"] is False
        assert [row["verdict"] for row in report["bins"][:3]] == ["dense"] * 3
