"""Chi-square of drawn sequences against exact probabilities, and sampling parameters by loops."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats


def p_value(drawn: Iterable[Any], expected: Mapping[Any, float]) -> float:
    """Chance of a chi-square as large as that of `drawn`, if it follows `expected`.

    Rare outcomes are pooled until at least five are expected.
    """
    counts = Counter(drawn)
    impossible = set(counts) - {key for key, p in expected.items() if p > 0}
    if impossible:
        return 0.0
    cells: list[list[float]] = [[0.0, 0.0]]
    for key, p in sorted(expected.items(), key=lambda item: item[1]):
        if cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += counts[key]
        cells[-1][1] += p * counts.total()
    observed, exact = np.array(cells[:-1] or cells).T
    if len(cells) > 1:
        observed[-1] += cells[-1][0]
        exact[-1] += cells[-1][1]
    statistic = float(((observed - exact) ** 2 / exact).sum())
    return float(stats.chi2.sf(statistic, max(1, len(exact) - 1)))


def sampled_from(
    logits: Sequence[float],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The distribution that a request samples from, token by token."""
    scaled = np.exp((np.array(logits, dtype=float) - max(logits)) / temperature)
    whole = scaled / scaled.sum()
    kept, mass = np.zeros(len(whole)), 0.0
    for rank, token in enumerate(sorted(range(len(whole)), key=lambda i: -whole[i])):
        within = top_k is None or rank < top_k
        if within and mass <= top_p and whole[token] >= min_p * whole.max():
            kept[token] = whole[token]
        mass += whole[token]
    return kept / kept.sum()
