"""Dense log-probs of given sequences from the server that generated them sparsely."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.mismatch.scores import TOP_K, DenseScores, dense_scores, scoring_request

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

    Raises:
        ValueError: an empty prompt or response, or `top_k` below 1.
        EndpointError: the server refuses a sequence (too long, for example) or is gone.
    """
    if top_k < 1:
        raise ValueError(f"top_k={top_k}: expected 1 or more")
    for index, (prompt, response) in enumerate(sequences):
        if not len(prompt) or not len(response):
            raise ValueError(
                f"sequences[{index}] has {len(prompt)} prompt and {len(response)} response tokens:"
                " expected at least one of each"
            )
    endpoint = connect(target, api_key)
    namespace = f"sparrow-dense-{uuid.uuid4().hex}"
    scores = []
    for batch in _batches(sequences):
        requests = [
            scoring_request(prompt, response, top_k, namespace, lora_path)
            for prompt, response in batch
        ]
        answers = endpoint.generate(requests)
        scores += [
            dense_scores(answer, response)
            for answer, (_, response) in zip(answers, batch, strict=True)
        ]
    return scores


def _batches(sequences: Sequences) -> Iterator[Sequences]:
    """Consecutive sequences of at most BATCH_TOKENS tokens together, or one longer sequence."""
    start = tokens = 0
    for index, (prompt, response) in enumerate(sequences):
        length = len(prompt) + len(response)
        if index > start and tokens + length > BATCH_TOKENS:
            yield sequences[start:index]
            start, tokens = index, 0
        tokens += length
    if start < len(sequences):
        yield sequences[start:]
