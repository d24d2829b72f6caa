"""Choose a selection rule for a model: rotary pairs, how layers share the budget, dense layers.
`partial` are layers that never read the whole KV, whatever the schedule says. They count as dense,
as in `BudgetSchedule.for_model`, and have no share in a budget."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.calibration.choice import CONFIDENCE
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.mismatch.tail import TAIL_PERCENTILE, BinTail, TailStatistics
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.schedules.selection import PairLists, SelectionRule

MOST_DENSE = 2
# The context divided by the first is what the sparse layer reads while sensitivities are measured;
# divided by the second, what all layers read on average while sets of dense layers are compared.
SENSITIVITY_SHARE = 16
DENSE_SHARE = 8
# A sensitivity below this is noise; used as it is, it would leave a layer only its recent pages.
_LEAST_SENSITIVITY = 1e-4


@dataclass(frozen=True)
class RuleChoice:
    """The chosen rule, its evidence for a schedule's provenance, and dense and partial layers."""

    selection: SelectionRule
    dense_layers: tuple[int, ...]
    evidence: dict[str, Any]
    partial: tuple[int, ...] = ()


def chosen_pairs(variances: NDArray[np.float64]) -> PairLists:
    """Half of each head's rotary pairs, those whose part of the scores varies most over landmarks.
    Their number is a multiple of 8, as the GPU kernels require. `variances` is [layers, KV heads,
    D/2]; of pairs with equal variances the slower one is taken."""
    half = variances.shape[-1]
    count = min(half, max(8, half // 2 // 8 * 8))
    # Sort stably from the slowest pair on, so that it wins among equal ones.
    order = half - 1 - np.argsort(-variances[..., ::-1], axis=-1, kind="stable")
    lists: list[list[list[int]]] = np.sort(order[..., :count], axis=-1).tolist()
    return tuple(tuple(tuple(pairs) for pairs in layer) for layer in lists)


def variance_kept(variances: NDArray[np.float64], pairs: PairLists) -> list[list[float]]:
    """Share of the variance in the chosen pairs, [layers][KV heads]; 1 where the variance is 0."""
    kept = np.take_along_axis(variances, np.array(pairs), axis=-1).sum(-1)
    whole = variances.sum(-1)
    share: list[list[float]] = np.where(whole > 0, kept / np.maximum(whole, 1e-300), 1.0).tolist()
    return [[round(value, 4) for value in layer] for layer in share]


def rule_settings(rule: SelectionRule) -> dict[str, Any]:
    """The fields of a rule; lists of rotary pairs become a digest."""
    fields = rule.model_dump(mode="json")
    if rule.landmark_pairs is not None:
        text = json.dumps(fields["landmark_pairs"])
        fields["landmark_pairs"] = hashlib.sha256(text.encode()).hexdigest()
    return fields


def least_pages(page_size: int) -> int:
    """The default sinks and recent pages, which no budget goes below."""
    return BudgetSchedule.drafts(page_size).least_pages


def sensitivity_schedule(
    layer: int,
    rule: SelectionRule,
    layers: int,
    page_size: int,
    context: int,
    partial: Sequence[int] = (),
) -> BudgetSchedule:
    """Only `layer` is sparse and reads 1/16 of the context; the others read the whole KV."""
    sharing = layers - len(partial)
    least = least_pages(page_size) + 1
    pages_read = max(least, context // SENSITIVITY_SHARE // page_size)
    # Weights have a mean of 1 and one is small, so the budget must be a little above the context.
    pages = -(-context // page_size)
    budget = -(-pages * sharing // max(1, sharing - 1)) + 1
    share = pages_read / budget
    weights = [(sharing - share) / max(1, sharing - 1)] * layers
    weights[layer] = share if sharing > 1 else 1.0
    tokens = (budget if sharing > 1 else pages_read) * page_size
    return weighted_schedule(f"layer-{layer}", rule, weights, page_size, tokens, partial)


def sensitivities(measured: Mapping[int, Sequence[Tokens]], layers: int) -> list[float]:
    """Per layer 1 - mean acceptance rate with it alone sparse; 0 for one that was not measured."""
    losses = [0.0] * layers
    for layer, runs in measured.items():
        losses[layer] = float(1 - np.mean(np.concatenate([tokens.rates for tokens in runs])))
    return losses


def layer_weights(sensitivity: Sequence[float], others: Sequence[int]) -> list[float]:
    """Weights by the square root of sensitivities, with a mean of 1 over the sparse layers: if a
    layer's loss falls as c / budget, this minimises the total. Dense or partial `others` get 0."""
    root = np.sqrt(np.maximum(sensitivity, _LEAST_SENSITIVITY))
    root[list(others)] = 0.0
    sparse = len(root) - len(others)
    return [float(weight) for weight in root * sparse / root.sum()]


def dense_candidates(
    sensitivity: Sequence[float], partial: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """Sets of dense layers worth comparing: none, the most sensitive one or two, and (0, 1).
    Returns only sets that leave half of the budget or more to the sparse layers."""
    order = np.argsort(-np.asarray(sensitivity), kind="stable").tolist()
    order = [layer for layer in order if layer not in partial]
    candidates = [tuple(sorted(order[:count])) for count in range(MOST_DENSE + 1)] + [(0, 1)]
    fitting = [
        dense
        for dense in candidates
        if len(dense) * DENSE_SHARE * 2 <= len(order) and not set(dense) & set(partial)
    ]
    return sorted(set(fitting), key=lambda dense: (len(dense), dense))


def dense_schedule(
    dense: Sequence[int],
    sensitivity: Sequence[float],
    rule: SelectionRule,
    page_size: int,
    context: int,
    partial: Sequence[int] = (),
) -> BudgetSchedule:
    """All layers together read 1/8 of the context, while `dense` layers read the whole KV."""
    sharing = len(sensitivity) - len(partial)
    sparse = np.array(layer_weights(sensitivity, [*dense, *partial]))
    share = (sharing - len(dense) * DENSE_SHARE) / (sharing - len(dense))
    weights = sparse * share
    weights[list(dense)] = DENSE_SHARE
    least = least_pages(page_size) + 1
    tokens = max(least, -(-context // page_size // DENSE_SHARE)) * page_size
    name = f"dense-{'-'.join(map(str, dense)) or 'none'}"
    return weighted_schedule(name, rule, weights.tolist(), page_size, tokens, partial)


def choose_rule(
    rule: SelectionRule,
    variance_kept: Sequence[Sequence[float]],
    sensitivity: Sequence[float],
    measured: Mapping[tuple[int, ...], Sequence[Tokens]],
    partial: Sequence[int] = (),
) -> RuleChoice:
    """The dense layers whose tail is best at the same KV tokens in total, and weights for the rest.
    `measured` is by dense layers. Among sets whose tails cannot be told apart the smallest is
    taken: the tail of a larger set must lie above the confidence interval of a smaller one."""
    tails = {dense: _tail(tokens) for dense, tokens in measured.items()}
    best: tuple[int, ...] = ()
    for dense in sorted(tails, key=len):
        high = tails[best].tail_high
        if high is not None and tails[dense].tail > high:
            best = dense
    weights = layer_weights(sensitivity, [*best, *partial])
    return RuleChoice(
        with_weights(rule, [round(weight, 4) for weight in weights]),
        tuple(sorted({*best, *partial})),
        {
            "variance_kept": [
                [] if layer in partial else list(shares)
                for layer, shares in enumerate(variance_kept)
            ],
            "sensitivity": [round(value, 6) for value in sensitivity],
            "dense_layers": [
                {
                    "layers": list(dense),
                    "tokens": tail.tokens,
                    "tail": tail.tail,
                    "low": tail.tail_low,
                    "high": tail.tail_high,
                }
                for dense, tail in sorted(tails.items(), key=lambda pair: (len(pair[0]), pair[0]))
            ],
        },
        tuple(partial),
    )


def describe_rule(choice: RuleChoice) -> str:
    if not choice.evidence:
        return f"selection rule: {choice.selection}"
    order = np.argsort([-value for value in choice.evidence["sensitivity"]], kind="stable")
    most = ", ".join(f"{i} ({choice.evidence['sensitivity'][i]:.3f})" for i in order[:3].tolist())
    kept = [share for layer in choice.evidence["variance_kept"] for share in layer]
    whole = [layer for layer in choice.dense_layers if layer not in choice.partial]
    dense = ", ".join(map(str, whole)) or "none"
    tails = "; ".join(
        f"{', '.join(map(str, row['layers'])) or 'none'} {row['tail']:.3f}"
        for row in choice.evidence["dense_layers"]
    )
    return (
        f"selection rule: {choice.selection}\n"
        "share of the scores' variance in these rotary pairs, by layer and KV head:"
        f" {min(kept):.2f} to {max(kept):.2f}\n"
        f"most sensitive layers (1 - mean acceptance rate alone): {most}\n"
        f"dense layers: {dense} (tails at the same KV tokens: {tails})"
    )


def with_weights(rule: SelectionRule, weights: Sequence[float]) -> SelectionRule:
    """An int4 `rule` with the budget divided among layers by `weights`; another as it is."""
    if not rule.int4:
        return rule
    return SelectionRule(**(rule.model_dump() | {"layer_weights": list(weights)}))


def _tail(tokens: Sequence[Tokens]) -> BinTail:
    statistics = TailStatistics()
    for each in tokens:
        statistics.add(each.prompt, np.zeros_like(each.cached), each.rates)
    (tail,) = statistics.bins(TAIL_PERCENTILE, CONFIDENCE)
    return tail


def weighted_schedule(
    name: str,
    rule: SelectionRule,
    weights: Sequence[float],
    page_size: int,
    tokens: int,
    partial: Sequence[int] = (),
) -> BudgetSchedule:
    """One budget of `tokens`, divided among layers by `weights`; `partial` ones are dense."""
    return BudgetSchedule(
        name=name,
        page_size=page_size,
        bin_tokens=page_size,
        budget_tokens=(tokens,),
        dense_layers=tuple(partial),
        selection=with_weights(rule, weights),
    )
