"""Rounds as benchmarks name, draw and count them."""

import argparse
from collections import Counter

import numpy as np
import pytest
import torch

from sparrow_sglang.benchmarks.common import parse_round
from sparrow_sglang.benchmarks.given_rounds import accepted_at, counting_choice, measured_rounds
from sparrow_sglang.planning.rounds import DENSE, Plan, expected_tokens
from sparrow_sglang.planning.step_time import Acceptance


def test_rounds_are_written_as_drafts_and_lookups() -> None:
    rounds = {"8": Plan(8, 0, 9), "0+3": Plan(0, 3, 4), "2+2": Plan(2, 2, 5)}
    assert {text: parse_round(text) for text in rounds} == rounds
    assert [str(plan) for plan in rounds.values()] == [*rounds]
    kinds = ["dense", "sparse", "lookups", "sparse+lookups"]
    assert [plan.kind for plan in (DENSE, *rounds.values())] == kinds
    for text in ("0", "0+0", "-1", "33", "8+", "30+3", "8+x"):
        with pytest.raises(argparse.ArgumentTypeError, match="1 to 32"):
            parse_round(text)


def test_drafts_and_lookups_are_accepted_at_their_rates_and_counted_apart() -> None:
    torch.manual_seed(0)
    rates, plan = Acceptance(0.8, 0.3), Plan(2, 2, 9)
    counts: dict[str, Counter[str]] = {}
    choice = counting_choice(counts, [Plan(2, 2, 5)])(9, True)
    assert choice.next_round(1, 1.0) == plan  # in the rows that the engine verifies
    accepted = accepted_at(rates, plan, 40_000, "cpu").tolist()
    choice.observe(plan, accepted)
    row = measured_rounds(counts)
    assert row["acceptance_rate"] == pytest.approx(0.8, abs=0.01)
    assert row["lookup_acceptance"] == pytest.approx(0.3, abs=0.01)
    tokens = row["rounds"]["sparse+lookups"]["tokens_per_round"]
    assert tokens == pytest.approx(np.mean(accepted) + 1)
    assert tokens == pytest.approx(expected_tokens(plan, 0.8, [0.3, 0.3]), abs=0.02)


def test_counts_of_rounds_by_hand() -> None:
    counts: dict[str, Counter[str]] = {}
    choice = counting_choice(counts, [])(4, True)
    # Rejected at the first draft, at the first lookup, at the second; nothing.
    choice.observe(Plan(1, 2, 4), [0, 1, 2, 3])
    choice.observe(DENSE, [0, 0])
    row = measured_rounds(counts)
    assert (row["acceptance_rate"], row["lookup_acceptance"]) == (3 / 4, 3 / 5)
    assert row["rounds"]["dense"]["tokens_per_round"] == 1
    assert measured_rounds({})["acceptance_rate"] is None
