"""Rounds as benchmarks name, predict, draw and count them."""

import argparse

import numpy as np
import pytest
import torch

from sparrow_sglang.benchmarks.rounds import (
    Rates,
    Round,
    RoundCounts,
    accepted_at,
    measured_rounds,
    parse_round,
)


def test_rounds_are_written_as_drafts_and_lookups() -> None:
    assert parse_round("8") == Round(8, 0) and str(parse_round("8")) == "8"
    assert parse_round("0+3") == Round(0, 3) and str(parse_round("0+3")) == "0+3"
    assert [Round(*pair).kind for pair in ((0, 0), (2, 0), (0, 2), (2, 2))] == [
        "dense",
        "sparse",
        "lookups",
        "sparse+lookups",
    ]
    for text in ("0", "0+0", "-1", "33", "8+", "30+3", "8+x"):
        with pytest.raises(argparse.ArgumentTypeError, match="1 to 32"):
            parse_round(text)


def test_tokens_of_a_round_follow_from_the_rates() -> None:
    assert Round(4).tokens(Rates(1.0, 0.0)) == 5
    assert Round(8).tokens(Rates(0.9)) == pytest.approx((1 - 0.9**9) / (1 - 0.9))
    assert Round(0, 3).tokens(Rates(0.1, 0.5)) == 1 + 0.5 + 0.25 + 0.125
    assert Round(1, 1).tokens(Rates(0.5, 0.25)) == 1 + 0.5 + 0.5 * 0.25


def test_drafts_and_lookups_are_accepted_at_their_rates_and_counted_apart() -> None:
    torch.manual_seed(0)
    rates, round_, counts = Rates(0.8, 0.3), Round(2, 2), RoundCounts()
    accepted = accepted_at(rates, round_, 40_000, "cpu").tolist()
    counts.add(round_, accepted)
    row = measured_rounds(counts.kinds)
    assert row["acceptance_rate"] == pytest.approx(0.8, abs=0.01)
    assert row["lookup_acceptance"] == pytest.approx(0.3, abs=0.01)
    kind = row["rounds"]["sparse+lookups"]
    assert kind["tokens_per_round"] == pytest.approx(np.mean(accepted) + 1)
    assert kind["tokens_per_round"] == pytest.approx(round_.tokens(rates), abs=0.02)


def test_counts_of_rounds_by_hand() -> None:
    counts = RoundCounts()
    # Rejected at the first draft, at the first lookup, at the second; nothing.
    counts.add(Round(1, 2), [0, 1, 2, 3])
    counts.add(Round(0), [0, 0])
    row = measured_rounds(counts.kinds)
    assert (row["acceptance_rate"], row["lookup_acceptance"]) == (3 / 4, 3 / 5)
    assert row["rounds"]["dense"]["tokens_per_round"] == 1
    assert measured_rounds({})["acceptance_rate"] is None
