"""Selection rules chosen by measurement: who reads what while measuring, and how layers share."""

import numpy as np
import pytest

from sparrow_sglang.calibration.rule import (
    choose_rule,
    chosen_pairs,
    dense_candidates,
    dense_schedule,
    describe_rule,
    layer_weights,
    sensitivities,
    sensitivity_schedule,
    variance_kept,
)
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.schedules.selection import SelectionRule

PAGE = 16


def pages_of_layers(
    schedule: BudgetSchedule, cached_pages: int, dense: tuple[int, ...] = ()
) -> list[int]:
    """Pages that each layer would read if it were sparse, by the definition and not by the
    schedule's own methods."""
    weights = schedule.selection.layer_weights
    assert weights is not None and schedule.dense_layers == dense
    budget = schedule.budget_tokens[0] // PAGE
    least = schedule.sink_pages + schedule.recent_pages
    share = [max(least, int(np.floor(float(np.float32(w)) * budget + 0.5))) for w in weights]
    return [min(cached_pages, pages) for pages in share]


def tokens(prompt: str, rates: list[float]) -> Tokens:
    return Tokens(prompt, np.arange(100, 100 + len(rates)), np.array(rates))


@pytest.mark.parametrize("layers", [1, 2, 3, 30, 64])
@pytest.mark.parametrize("context", [320, 4096, 8192, 40960])
def test_one_layer_alone_leaves_pages_out(layers: int, context: int) -> None:
    rule = SelectionRule(landmark_bits=4)
    for layer in {0, layers // 2, layers - 1}:
        schedule = sensitivity_schedule(layer, rule, layers, PAGE, context)
        read = pages_of_layers(schedule, context // PAGE)
        expected = max(4, context // 16 // PAGE)
        assert abs(read.pop(layer) - expected) <= 1
        assert read == [context // PAGE] * (layers - 1)


def test_weights_are_roots_of_sensitivities_and_leave_the_budget_as_it_is() -> None:
    draw = np.random.default_rng(0)
    sensitivity = draw.uniform(0.003, 0.07, 30)
    for dense in [(), (3,), (0, 1)]:
        weights = np.array(layer_weights(sensitivity.tolist(), dense))
        sparse = np.setdiff1d(np.arange(30), dense)
        assert weights[sparse].mean() == pytest.approx(1)
        assert weights[list(dense)].tolist() == [0.0] * len(dense)
        ratio = weights[sparse] / np.sqrt(sensitivity[sparse])
        assert np.ptp(ratio) < 1e-9 * ratio.max()


def test_sets_of_dense_layers_are_compared_at_equal_kv_tokens() -> None:
    sensitivity = np.random.default_rng(2).uniform(0.003, 0.07, 40).tolist()
    sensitivity[7] = sensitivity[9] = 0.5
    found = dense_candidates(sensitivity)
    assert found == [(), (7,), (0, 1), (7, 9)]
    context = 8192
    for dense in found:
        schedule = dense_schedule(dense, sensitivity, SelectionRule(landmark_bits=4), PAGE, context)
        read = pages_of_layers(schedule, context // PAGE)
        assert all(read[layer] == context // PAGE for layer in dense)
        assert sum(read) / 40 == pytest.approx(context // PAGE / 8, rel=0.02)


def test_a_dense_layer_must_pay_beyond_doubt() -> None:
    sensitivity = [0.01] * 40
    draw = np.random.default_rng(3)
    groups = [draw.uniform(0.7, 1.0, 500).tolist() for _ in range(8)]

    def shifted(by: float) -> list[Tokens]:
        return [tokens(str(i), [min(1.0, r + by) for r in rates]) for i, rates in enumerate(groups)]

    rule = SelectionRule(landmark_bits=4, landmark_pairs=chosen_pairs(np.ones((40, 2, 64))))
    kept = [[0.5, 0.75]] * 40
    near = choose_rule(rule, kept, sensitivity, {(): shifted(0.0), (0, 1): shifted(0.001)})
    far = choose_rule(rule, kept, sensitivity, {(): shifted(0.0), (0, 1): shifted(0.15)})
    assert (near.dense_layers, far.dense_layers) == ((), (0, 1))
    assert near.selection.layer_weights == (1.0,) * 40
    assert far.selection.layer_weights == (0.0, 0.0) + (1.0,) * 38
    assert "dense layers: 0, 1" in describe_rule(far)
    assert "in these rotary pairs, by layer and KV head: 0.50 to 0.75" in describe_rule(far)
    assert far.evidence["variance_kept"] == kept
    assert [row["layers"] for row in far.evidence["dense_layers"]] == [[], [0, 1]]
    # A tail of 0 whose interval is 0, too.
    none = [tokens(str(i), [0.0] * 500) for i in range(8)]
    assert choose_rule(rule, kept, sensitivity, {(): none, (0, 1): shifted(0.0)}).dense_layers
    BudgetSchedule(
        name="x", page_size=PAGE, bin_tokens=PAGE, budget_tokens=(512,),
        selection=far.selection, dense_layers=far.dense_layers,
    )  # fmt: skip


def test_sensitivity_is_what_a_layer_alone_costs_on_average() -> None:
    measured = {0: [tokens("a", [1.0, 0.5]), tokens("b", [0.9])], 1: [tokens("a", [1.0])]}
    assert sensitivities(measured, 2) == pytest.approx([0.2, 0.0])
    assert sensitivities({1: measured[0]}, 3) == pytest.approx([0.0, 0.2, 0.0])


def test_layers_with_a_window_have_no_share_in_a_budget() -> None:
    """Every other one of 40 layers has a window; the budget is the average over the rest."""
    partial, context = tuple(range(0, 40, 2)), 8192
    alone = sensitivity_schedule(7, SelectionRule(landmark_bits=4), 40, PAGE, context, partial)
    read = pages_of_layers(alone, context // PAGE, partial)
    assert {read[layer] for layer in range(1, 40, 2) if layer != 7} == {context // PAGE}
    assert abs(read[7] - context // 16 // PAGE) <= 1

    sensitivity = [0.0 if layer in partial else 0.01 * (layer + 1) for layer in range(40)]
    assert dense_candidates(sensitivity, partial) == [(), (39,)]
    for dense in ((), (39,)):
        schedule = dense_schedule(
            dense, sensitivity, SelectionRule(landmark_bits=4), PAGE, context, partial
        )
        read = pages_of_layers(schedule, context // PAGE, partial)
        whole = [read[layer] for layer in range(1, 40, 2)]
        assert np.mean(whole) == pytest.approx(context // PAGE / 8, rel=0.03)

    rule = SelectionRule(landmark_bits=4, landmark_pairs=chosen_pairs(np.ones((40, 2, 64))))
    measured = {
        dense: [tokens(str(prompt), [rate] * 50) for prompt in range(8)]
        for dense, rate in (((), 0.5), ((39,), 0.9))
    }
    choice = choose_rule(rule, [[0.5, 0.6]] * 40, sensitivity, measured, partial)
    assert choice.dense_layers == (*partial, 39)
    assert "dense layers: 39 (" in describe_rule(choice)
    weights = np.array(choice.selection.layer_weights)
    assert not weights[[*partial, 39]].any()
    assert weights[1:39:2].mean() == pytest.approx(1, abs=1e-4)
    assert choice.evidence["variance_kept"][:2] == [[], [0.5, 0.6]]
    assert "by layer and KV head: 0.50 to 0.60" in describe_rule(choice)


@pytest.mark.parametrize(
    ("half", "count"), [(4, 4), (8, 8), (16, 8), (32, 16), (40, 16), (48, 24), (64, 32)]
)
def test_half_of_the_pairs_are_kept_those_that_vary_most(half: int, count: int) -> None:
    variances = np.random.default_rng(half).random((3, 2, half))
    pairs = chosen_pairs(variances)
    assert np.array(pairs).shape == (3, 2, count)
    for layer in range(3):
        for head in range(2):
            kept = pairs[layer][head]
            left = [pair for pair in range(half) if pair not in kept]
            assert list(kept) == sorted(kept)
            of_head = variances[layer, head]
            assert min(of_head[list(kept)]) > max(of_head[left], default=-1)
            share = of_head[list(kept)].sum() / of_head.sum()
            assert variance_kept(variances, pairs)[layer][head] == pytest.approx(share, abs=1e-4)
