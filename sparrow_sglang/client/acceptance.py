"""Dense log-probs and mean acceptance of sequences, on the server that generated them sparsely, for
training loops other than ours. Prefill is dense, so a request that prefills prompt and response
gives the dense log-probs. Exact rates, and their tails, come from the server's own audit."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow_sglang.client.control import get_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.mismatch.acceptance import SampledMean, mean_acceptance_from_samples
from sparrow_sglang.mismatch.exact_rates import response_logprobs
from sparrow_sglang.mismatch.tail import NOT_COUNTED, token_bins
from sparrow_sglang.schedules.schedule import BudgetSchedule

BATCH_TOKENS = 65536
"""Sequences are sent in batches of up to this many tokens, to bound the server's queue."""

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class DenseScores:
    """Natural log-probs [T] of a response's tokens under full attention."""

    logprobs: NDArray[np.float64]


def score_dense(
    target: Any, sequences: Sequences, lora_path: str | None = None, *, api_key: str | None = None
) -> list[DenseScores]:
    """Dense scores of each response after its prompt, at temperature 1.

    `target` is an `sglang.Engine` or a server's base URL; `sequences` are pairs of prompt ids and
    response ids, neither empty; `lora_path` names a loaded adapter, None the base model; `api_key`
    is the server's --api-key, if it has one. Each call uses a prefix-cache namespace of its own, so
    no cached KV, which sparse decode may have written, can enter the result; the cost is that the
    prompts are prefilled again.

    Raises `ValueError` on an empty prompt or response, `EndpointError` if the server refuses a
    sequence or is down.
    """
    for index, (prompt, response) in enumerate(sequences):
        if not len(prompt) or not len(response):
            raise ValueError(f"sequences[{index}]: expected a prompt and a response, neither empty")
    endpoint = connect(target, api_key)
    namespace = f"sparrow-dense-{uuid.uuid4().hex}"
    scores = []
    for batch in _batches(sequences):
        answers = endpoint.generate(
            [
                {
                    "input_ids": [int(token) for token in (*prompt, *response)],
                    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": len(prompt) - 1,
                    "extra_key": namespace,
                    "lora_path": lora_path,
                    "log_metrics": False,
                }
                for prompt, response in batch
            ]
        )
        scores += [
            DenseScores(response_logprobs(answer, response))
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
    """How far the rollouts of a batch are from what the dense policy would have sampled. `mean` is
    over the tokens that were decoded sparsely, see `token_bins`; None if there are none."""

    mean: SampledMean | None
    dense: list[DenseScores]


def measure_acceptance(
    target: Any,
    sequences: Sequences,
    rollouts: Sequence[Mapping[str, Any] | ArrayLike],
    *,
    schedule: BudgetSchedule | None = None,
    lora_path: str | None = None,
    api_key: str | None = None,
) -> BatchAcceptance:
    """Score `sequences` densely on the server that sampled them, and compare.

    Call it before the weights change. `target`, `sequences` and `api_key` are as in `score_dense`;
    each response came from one request.

    Args:
        rollouts: per sequence, what its sampler recorded at temperature 1 without truncation: the
            log-probs [T] of the response's tokens, or the answer of `Engine.generate` or /generate
            to a request with `return_logprob`.
        schedule: the one that the responses were decoded under; None reads the server's
            active one, for which `api_key` must be that of `get_schedule`.
        lora_path: adapter to score with; None is the base model, which is what a rollout under a
            DistillSparse adapter is compared with.

    Raises `ValueError` if lengths differ, and as `score_dense`.
    """
    if len(rollouts) != len(sequences) or not len(sequences):
        raise ValueError(
            f"{len(sequences)} sequences, {len(rollouts)} rollouts: expected as many, 1 or more"
        )
    sampled = [_recorded(rollout) for rollout in rollouts]
    for index, (logprobs, (_, response)) in enumerate(zip(sampled, sequences, strict=True)):
        if logprobs.shape != (len(response),):
            raise ValueError(
                f"rollouts[{index}]: log-probs {logprobs.shape}: expected [{len(response)}]"
            )
    active = get_schedule(target, api_key=api_key) if schedule is None else schedule
    dense = score_dense(target, sequences, lora_path, api_key=api_key)
    bins = [token_bins(active, len(prompt), len(response)) for prompt, response in sequences]
    counted = np.concatenate(bins) != NOT_COUNTED
    left = np.concatenate(sampled)[counted]
    right = np.concatenate([scores.logprobs for scores in dense])[counted]
    mean = mean_acceptance_from_samples(left, right) if counted.any() else None
    return BatchAcceptance(mean, dense)


def _recorded(rollout: Mapping[str, Any] | ArrayLike) -> NDArray[np.float64]:
    if isinstance(rollout, Mapping):
        rollout = [value for value, *_ in rollout["meta_info"].get("output_token_logprobs") or []]
    return np.asarray(rollout, np.float64)
