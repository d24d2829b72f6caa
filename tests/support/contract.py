"""The contract of one sparse decode step as a slow float64 loop, written from its wording alone.

1. With L cached tokens, n = ceil(L / p) pages and a budget of b pages, n <= b attends to all.
2. Otherwise each KV head keeps the first `sinks` pages, the last `recents` pages (the partial page
   among them) and, of the pages between, those with the highest score; ties go to the lower index.
3. score = (mean of the query heads of the group) . landmark; landmark = mean of the page's keys,
   stored in the dtype of the KV cache.
4. Attention over the kept pages is exact; the softmax runs over the kept tokens only. A query head
   with a sink has one more term in the denominator of its softmax, exp(sink).

The rule with int4 landmarks changes 3: a page has a landmark for every few of its tokens, stored in
int4. The page's score is the largest product of any of its landmarks with any query of the group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def budget_pages(length: int, page_size: int, bin_tokens: int, budget_tokens: Sequence[int]) -> int:
    """KV budget in pages at a length, by walking the bins one at a time."""
    pages = -(-length // page_size)
    pages_per_bin = bin_tokens // page_size
    index = 0
    while index + 1 < len(budget_tokens) and pages >= (index + 1) * pages_per_bin:
        index += 1
    return budget_tokens[index] // page_size


def step_budget(schedule: Any, length: int, cap: int | None = None) -> int:
    """KV budget in pages by the numbers of a schedule. A request may have a `cap` in tokens; one
    without reads everything up to the schedule's dense tokens."""
    page_size = schedule.page_size
    budget = budget_pages(length, page_size, schedule.bin_tokens, schedule.budget_tokens)
    if cap is not None:
        return min(budget, cap // page_size)
    return -(-length // page_size) if length <= schedule.dense_tokens else budget


def tokens_read(schedule: Any, length: int, cap: int | None = None) -> int:
    """Tokens that a step reads: all but the pages left out, which are whole."""
    left_out = -(-length // schedule.page_size) - step_budget(schedule, length, cap)
    return length - max(0, left_out) * schedule.page_size


def landmarks_of(page_keys: np.ndarray, int4: bool, store: Callable) -> np.ndarray:
    """Landmarks [n, D] of a page's keys [page, D]."""
    size, dim = page_keys.shape
    tokens = max(4, size // 8) if int4 else size
    means = page_keys.reshape(-1, tokens, dim).mean(1)
    if not int4:
        return store(means)
    landmarks = np.zeros((len(means), dim))
    for landmark, mean in zip(landmarks, means.astype(np.float32), strict=True):
        scale = np.float32(np.float16(abs(mean).max() / np.float32(7)))
        codes = np.rint(mean / scale) if scale else np.zeros(len(mean))
        landmark[:] = float(scale) * np.clip(codes, -7, 7).astype(float)
    return landmarks


def choose_pages(scores: list[float], pages: int, budget: int, sinks: int, recents: int) -> list:
    """Logical pages kept by one KV head, ascending; `scores` has one entry per page."""
    if pages <= budget:
        return list(range(pages))
    kept = set(range(sinks)) | set(range(pages - recents, pages))
    between = [page for page in range(pages) if page not in kept]
    while len(kept) < budget:
        best = between[0]
        for page in between[1:]:
            if scores[page] > scores[best]:
                best = page
        between.remove(best)
        kept.add(best)
    return sorted(kept)


def decode_one(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    budget: int,
    page_size: int,
    sm_scale: float,
    sinks: int = 1,
    recents: int = 2,
    store=lambda landmark: landmark,
    rule: str = "published",
    logit_sinks: np.ndarray | None = None,
    known: dict[tuple[int, int], np.ndarray] | None = None,
) -> tuple[np.ndarray, list]:
    """One request's decode step: output [Hq, D] and the kept logical pages of each KV head. `q` is
    [Hq, D], `keys` and `values` [L, Hkv, D], `logit_sinks` [Hq], all float64. `store` rounds a
    landmark [D] the way the KV dtype does; `rule` is that of a schedule's selection; `known` keeps
    landmarks of full pages by KV head and page from one step of a layer to the next."""
    num_q_heads = len(q)
    length, num_kv_heads, _ = keys.shape
    group = num_q_heads // num_kv_heads
    pages = -(-length // page_size)
    out = np.zeros((num_q_heads, values.shape[-1]))
    known = {} if known is None else known
    kept_by_head = []
    for head in range(num_kv_heads):
        queries = [q[head * group + member] for member in range(group)]
        if rule == "published":
            queries = [sum(queries) / group]
        scores = []
        for page in range(pages):
            page_keys = keys[page * page_size : (page + 1) * page_size, head]
            full = len(page_keys) == page_size
            if full and (head, page) not in known:
                known[head, page] = landmarks_of(page_keys, rule == "int4", store)
            marks = known[head, page] if full else []
            products = [float(query @ mark) for query in queries for mark in marks]
            scores.append(max(products) if full else float("nan"))
        kept = choose_pages(scores, pages, budget, sinks, recents)
        kept_by_head.append(kept)
        tokens = [
            token
            for page in kept
            for token in range(page * page_size, min((page + 1) * page_size, length))
        ]
        for member in range(group):
            row = head * group + member
            logits = keys[tokens, head] @ q[row] * sm_scale
            largest = logits.max()
            weights = np.exp(logits - largest)
            total = weights.sum()
            if logit_sinks is not None:
                total += np.exp(logit_sinks[row] - largest)
            out[row] = weights / total @ values[tokens, head]
    return out, kept_by_head
