"""Selection rules in schedules: what is read of files, layer budgets against a loop, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import budget_pages, layer_budget
from engines import RULE, RULED
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import chosen_pairs

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule, ScheduleError

FIELDS: dict[str, Any] = {
    "name": "mine",
    "page_size": 16,
    "bin_tokens": 64,
    "budget_tokens": [64, 80, 80, 112],
    "dense_layers": [0],
}


INT4 = {"landmark_bits": 4}


def with_weights(*weights: float, **fields: Any) -> BudgetSchedule:
    return BudgetSchedule(**FIELDS | {"selection": INT4 | {"layer_weights": weights}} | fields)


def test_a_rule_is_saved_and_read_back(tmp_path) -> None:
    RULED.save(tmp_path / "ruled.json")
    assert BudgetSchedule.from_json(tmp_path / "ruled.json") == RULED
    assert BudgetSchedule(**FIELDS, selection={}) == BudgetSchedule(**FIELDS)


@pytest.mark.parametrize(
    "selection",
    [
        None,
        {"landmark_bits": 8},
        {"landmark_pairs": [[[1]]]},
        {"layer_weights": [1, 1]},
        INT4 | {"landmark_pairs": []},
        INT4 | {"landmark_pairs": [[[0, 1.5]]]},
        INT4 | {"landmark_pairs": [[[2, 1]]]},
        INT4 | {"landmark_pairs": [[[1, 1]]]},
        INT4 | {"landmark_pairs": [[[1, 2], [3]]]},
        INT4 | {"landmark_pairs": [[[1]], [[1], [2]]]},
        INT4 | {"layer_weights": []},
        INT4 | {"layer_weights": [1, -1]},
        INT4 | {"layer_weights": [1, float("nan")]},
        INT4 | {"layer_weights": [1, 0.5, 1]},
        {"landmark_token": 4},
    ],
    ids=str,
)
def test_a_bad_field_is_refused_in_one_line(tmp_path, selection: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FIELDS | {"selection": selection}))
    with pytest.raises(ScheduleError, match="selection") as caught:
        BudgetSchedule.from_json(path)
    assert str(caught.value).startswith(f"{path}: ") and "selection" in str(caught.value)
    assert "\n" not in str(caught.value)


PAIRED = BudgetSchedule(
    **FIELDS, selection=INT4 | {"landmark_pairs": [[[0, 2], [1, 7], [3, 4]]] * 4}
)


@pytest.mark.parametrize(
    ("schedule", "config", "message"),
    [
        (RULED, {"num_hidden_layers": 5}, "layer_weights has 4 numbers: expected 5"),
        (RULED, {}, ""),
        (RULED, {"head_dim": None}, ""),
        (
            PAIRED,
            {"num_hidden_layers": 5},
            "for 4 layers of 3 KV heads: expected 5 layers of 3, as",
        ),
        (PAIRED, {"num_key_value_heads": 9}, "for 4 layers of 3 KV heads: expected 4 layers of 9"),
        (PAIRED, {"num_key_value_heads": None}, "expected 4 layers of 9"),
        (PAIRED, {"head_dim": 14}, "landmark_pairs has the index 7: expected at most 6"),
        (PAIRED, {}, ""),
    ],
)
def test_a_model_of_another_shape_is_refused(
    schedule: BudgetSchedule, config: dict[str, Any], message: str
) -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape |= {"hidden_size": 144, "head_dim": 16} | config
    for wrapped in (shape, {"text_config": shape}):
        if not message:
            schedule.require_model(wrapped)
            continue
        with pytest.raises(ScheduleError, match=message) as caught:
            schedule.require_model(wrapped)
        assert f"schedule {schedule.name}: " in str(caught.value)


def test_pairs_that_were_chosen_are_saved_and_read_back(tmp_path: Path) -> None:
    pairs = chosen_pairs(4, 3, 5, 16)
    rule = RULE.model_copy(update={"landmark_pairs": pairs})
    schedule = RULED.model_copy(update={"selection": rule, "provenance": {"a": "[\n 1,\n 2\n]"}})
    schedule.save(tmp_path / "chosen.json")
    assert BudgetSchedule.from_json(tmp_path / "chosen.json") == schedule
    assert rule.landmark_bytes(16, 16, 2) == RULE.landmark_bytes(16, 16, 2) - 4 * 3


@st.composite
def weighted_schedules(draw: st.DrawFn) -> BudgetSchedule:
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
    weights = [len(counts) * count / sum(counts) for count in counts]
    budgets = sorted(draw(st.lists(st.integers(3, 12), min_size=1, max_size=4)))
    return with_weights(7, *weights, budget_tokens=[16 * pages for pages in budgets])


def read_of_layer(schedule: BudgetSchedule, length: int, weight: float, cap: int | None) -> int:
    """Tokens that a layer of this weight reads, by the contract's loop."""
    budget = budget_pages(length, 16, schedule.bin_tokens, schedule.budget_tokens)
    budget = layer_budget(budget if cap is None else min(budget, cap // 16), weight, least=3)
    return length - 16 * max(0, -(-length // 16) - budget)


@settings(max_examples=60, deadline=None)
@given(schedule=weighted_schedules(), cap=st.sampled_from([None, 48, 96]))
def test_layers_read_by_their_weights_and_figures_are_their_mean(
    schedule: BudgetSchedule, cap: int | None
) -> None:
    lengths = range(1, 400)
    weights = schedule.selection.layer_weights[1:]
    read = np.array([[read_of_layer(schedule, n, w, cap) for w in weights] for n in lengths])
    pages = -(-np.array(lengths) // 16)
    for layer, weight in enumerate(weights):
        expected = -(-read[:, layer] // 16)
        assert schedule.pages_read(pages, weight, cap).tolist() == expected.tolist()
    figures = schedule.tokens_read(lengths, cap)
    assert figures.tolist() == np.floor(read.mean(1)).tolist()
    left_out = (read < np.array(lengths)[:, None]).any(1)
    assert (figures < np.array(lengths)).tolist() == left_out.tolist()
    first = RequestOption(schedule, cap).first_sparse_length()
    assert first == schedule.first_sparse_length(cap)
    assert first == (lengths[left_out.argmax()] if left_out.any() else first)


def test_the_device_counts_pages_as_the_schedule_does_for_every_layer_and_cap() -> None:
    uneven = with_weights(9, 0.1, 1.7, 1.2)
    even = BudgetSchedule(**FIELDS | {"name": "even", "selection": INT4})
    # Layer 2 has landmarks, as the first schedule reads it sparsely.
    denser = with_weights(0, 0.5, 7, 1.5, name="denser", dense_layers=[0, 2])
    budgets = BudgetTable(uneven, 4, 4, "cpu")
    pages = torch.arange(1, 60, dtype=torch.int32)
    for schedule in (uneven, even, denser, uneven.as_dense()):
        schedule.require_switch_from(uneven)
        budgets.load(schedule)
        options = [(schedule, None), (schedule, 80), (None, None), (schedule, 48)]
        budgets.set_options(range(4), [RequestOption(*each) for each in options])
        for row, (asked, cap) in enumerate(options):
            counted = budgets.num_selected(pages, torch.full_like(pages, row))
            assert counted.dtype == pages.dtype and counted.shape == (4, len(pages))
            for layer in range(4):
                expected = pages.numpy()
                if asked is not None and layer not in schedule.dense_layers:
                    weight = schedule.layer_weight(layer)
                    expected = schedule.pages_read(pages.numpy(), weight, cap)
                assert counted[layer].tolist() == expected.tolist()
