"""Dense log-probs and acceptance of sequences, on the server that generated them sparsely.

For training loops other than ours.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sparrow_sglang.client.control import get_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.mismatch.acceptance import (
    AcceptanceBounds,
    SampledMean,
    acceptance_bounds,
    mean_acceptance_from_samples,
)
from sparrow_sglang.mismatch.scores import (
    TOP_K,
    DenseScores,
    SparseScores,
    dense_scores,
    recorded_scores,
    scoring_request,
)
from sparrow_sglang.mismatch.tail import TailStatistics
from sparrow_sglang.mismatch.token_bins import NOT_COUNTED, tail_bin_tokens, token_bins
from sparrow_sglang.schedule import BudgetSchedule

BATCH_TOKENS = 65536
"""Sequences are sent in batches of up to this many tokens, to bound the server's queue."""

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


def score_dense(
    target: Any,
    sequences: Sequences,
    top_k: int = TOP_K,
    lora_path: str | None = None,
    *,
    api_key: str | None = None,
) -> list[DenseScores]:
    """Dense scores of each response after its prompt, at temperature 1.

    `target` is an `sglang.Engine` or a server's base URL; `sequences` are pairs of prompt ids and
    response ids, neither empty; `lora_path` names a loaded adapter, None the base model; `api_key`
    is the server's --api-key, if it has one. Each call uses a prefix-cache namespace of its own, so
    no cached KV, which sparse decode may have written, can enter the result; the cost is that the
    prompts are prefilled again.

    Raises `ValueError` on an empty prompt or response and `top_k` below 1, `EndpointError` if the
    server refuses a sequence or is gone.
    """
    if top_k < 1:
        raise ValueError(f"top_k={top_k}: expected 1 or more")
    for index, (prompt, response) in enumerate(sequences):
        if not len(prompt) or not len(response):
            raise ValueError(f"sequences[{index}]: expected a prompt and a response, neither empty")
    endpoint = connect(target, api_key)
    namespace = f"sparrow-dense-{uuid.uuid4().hex}"
    scores = []
    for batch in _batches(sequences):
        answers = endpoint.generate(
            [scoring_request(*sequence, top_k, namespace, lora_path) for sequence in batch]
        )
        scores += [
            dense_scores(answer, response)
            for answer, (_, response) in zip(answers, batch, strict=True)
        ]
    return scores


def _batches(sequences: Sequences) -> Iterator[Sequences]:
    start = tokens = 0
    for index, (prompt, response) in enumerate(sequences):
        length = len(prompt) + len(response)
        if index > start and tokens + length > BATCH_TOKENS:
            yield sequences[start:index]
            start, tokens = index, 0
        tokens += length
    if start < len(sequences):
        yield sequences[start:]


@dataclass(frozen=True)
class BatchAcceptance:
    """How far the rollouts of a batch are from what the dense policy would have sampled.

    Means and tails are over the tokens that were decoded sparsely, see `token_bins`.

    Attributes:
        mean: unbiased if the tokens were sampled at temperature 1 without truncation. None if no
            token was decoded sparsely.
        bounds: those of each token's rate, [T] per sequence; None without top-k lists.
        lower, upper: tails of the bounds, which enclose the true tail of a bin; None as `bounds`.
    """

    mean: SampledMean | None
    dense: list[DenseScores]
    bounds: list[AcceptanceBounds] | None
    lower: TailStatistics | None
    upper: TailStatistics | None


def measure_acceptance(
    target: Any,
    sequences: Sequences,
    rollouts: Sequence[Mapping[str, Any] | SparseScores | ArrayLike],
    *,
    schedule: BudgetSchedule | None = None,
    lora_path: str | None = None,
    api_key: str | None = None,
) -> BatchAcceptance:
    """Score `sequences` densely on the server that sampled them, and compare.

    Call it before the weights change. `target`, `sequences` and `api_key` are as in `score_dense`;
    each response came from one request. For confidence intervals, tokens of equal prompts count as
    one group, as samples of one prompt resemble each other.

    Args:
        rollouts: per sequence, what its sampler recorded at temperature 1 without truncation: the
            answer of `Engine.generate` or /generate to a request with `return_logprob` and
            `top_logprobs_num=20`; `SparseScores`; or, for the mean only, the log-probs [T] of the
            response's tokens. All with top-k lists, or all without.
        schedule: the one that the responses were decoded under; None asks the server for its
            active one, for which `api_key` must be that of `get_schedule`.
        lora_path: adapter to score with; None is the base model, which is what a rollout under a
            DistillSparse adapter is compared with.

    Raises `ValueError` if lengths differ, and as `score_dense`.
    """
    if len(rollouts) != len(sequences) or not len(sequences):
        raise ValueError(
            f"{len(sequences)} sequences, {len(rollouts)} rollouts: expected as many, 1 or more"
        )
    recorded = [
        recorded_scores(rollout) if isinstance(rollout, Mapping) else rollout
        for rollout in rollouts
    ]
    sampled = [np.asarray(getattr(scores, "logprobs", scores), np.float64) for scores in recorded]
    for index, (logprobs, (_, response)) in enumerate(zip(sampled, sequences, strict=True)):
        if logprobs.shape != (len(response),):
            raise ValueError(
                f"rollouts[{index}]: log-probs {logprobs.shape}: expected [{len(response)}]"
            )
    listed = [scores for scores in recorded if isinstance(scores, SparseScores)]
    if listed and len(listed) < len(recorded):
        raise ValueError(f"rollouts: {len(listed)} have top-k lists: expected all or none")
    active = get_schedule(target, api_key=api_key) if schedule is None else schedule
    dense = score_dense(target, sequences, TOP_K, lora_path, api_key=api_key)
    bins = [token_bins(active, len(prompt), len(response)) for prompt, response in sequences]
    counted = np.concatenate(bins) != NOT_COUNTED
    left = np.concatenate(sampled)[counted]
    right = np.concatenate([scores.logprobs for scores in dense])[counted]
    mean = mean_acceptance_from_samples(left, right) if counted.any() else None
    if not listed:
        return BatchAcceptance(mean, dense, None, None, None)
    bounds = [
        acceptance_bounds(left.top_ids, left.top_logprobs, right.top_ids, right.top_logprobs)
        for left, right in zip(listed, dense, strict=True)
    ]
    lower, upper = (TailStatistics(tail_bin_tokens(active)) for _ in range(2))
    for (prompt, _), of_tokens, bound in zip(sequences, bins, bounds, strict=True):
        cluster = ",".join(map(str, prompt))
        lower.add(cluster, of_tokens, bound.lower)
        upper.add(cluster, of_tokens, bound.upper)
    return BatchAcceptance(mean, dense, bounds, lower, upper)
