"""Chi-square of drawn sequences against exact probabilities, and sampling parameters by loops."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats

from sparrow_sglang.plugin.lossless.drafts import Requests

ALL = 1 << 30


def sampling(*requests: dict[str, float], device: str = "cpu") -> Any:
    """As SGLang's SamplingBatchInfo describes requests."""
    of = {
        name: [request.get(name, default) for request in requests]
        for name, default in {"temperature": 1.0, "top_k": ALL, "top_p": 1.0, "min_p": 0.0}.items()
    }
    return SimpleNamespace(
        temperatures=torch.tensor(of["temperature"], device=device)[:, None],
        top_ks=torch.tensor(of["top_k"], dtype=torch.int32, device=device),
        top_ps=torch.tensor(of["top_p"], device=device),
        min_ps=torch.tensor(of["min_p"], device=device),
        is_all_greedy=all(k <= 1 for k in of["top_k"]),
        is_any_greedy=any(k <= 1 for k in of["top_k"]),
        need_top_k_sampling=any(k != ALL for k in of["top_k"]),
        need_top_p_sampling=any(p < 1 for p in of["top_p"]),
        need_min_p_sampling=any(p > 0 for p in of["min_p"]),
    )


def drafts_of(drafting: Any, info: Any, plan: Any, vocabulary: int) -> Any:
    """Drafts of requests that begin with token 0."""
    latest = torch.zeros_like(info.top_ks, dtype=torch.int64)
    table = latest.int().new_zeros(len(latest), plan.rows)
    passes = SimpleNamespace(vocab_size=vocabulary, context_len=9, token_table=table)
    return drafting(Requests(latest, latest, None, latest, info, None), plan, passes)


REQUESTS = (
    {},
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.2},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 1},
)


def p_value(drawn: Iterable[Any], expected: Mapping[Any, float]) -> float:
    """Chance of a chi-square as large as that of `drawn`, if it follows `expected`. Rare outcomes
    are pooled until at least five are expected."""
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
