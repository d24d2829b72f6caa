"""Dense log-probs of given sequences from the server that generated them sparsely.

Prefill is dense, so a request that prefills prompt and response and generates nothing gives the
dense distributions of the same weights. In: sequences of token ids. Out: log-probs and top-k lists
per response token, at temperature 1, from which `mismatch` takes the acceptance rate.
"""

import base64
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.client.endpoint import connect

TOP_K = 20
BATCH_TOKENS = 65536
"""Sequences are sent in batches of up to this many tokens, to bound the server's queue."""

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class Scores:
    """Log-probs of one response of T tokens, in natural logarithms.

    `logprobs` are those of the response's own tokens. `top_ids` and `top_logprobs` hold the k most
    likely tokens per position, most likely first, whether or not the response's token is among
    them; they may go to `acceptance_bounds` as they are.
    """

    logprobs: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]

    def __post_init__(self) -> None:
        tokens = len(self.logprobs)
        if self.top_ids.shape != self.top_logprobs.shape or len(self.top_ids) != tokens:
            raise ValueError(
                f"logprobs of {tokens} tokens, top_ids {self.top_ids.shape}, top_logprobs"
                f" {self.top_logprobs.shape}: expected [T], [T, k] and [T, k]"
            )


class DenseScores(Scores):
    """Scores under full attention."""


class SparseScores(Scores):
    """Scores that were recorded by the sparse decode that sampled the tokens."""


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


def scoring_request(
    prompt: Sequence[int],
    response: Sequence[int],
    top_k: int,
    namespace: str,
    lora_path: str | None = None,
) -> dict[str, Any]:
    """The request, in fields of `GenerateReqInput`, whose answer `dense_scores` reads.

    `namespace` must be one in which no sparse decode has written KV.
    """
    request: dict[str, Any] = {
        "input_ids": [int(token) for token in (*prompt, *response)],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "top_logprobs_num": top_k,
        # One array instead of lists of triples, which take the server long for long responses.
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
        "extra_key": namespace,
        "log_metrics": False,
    }
    if lora_path is not None:
        request["lora_path"] = lora_path
    return request


def dense_scores(answer: Mapping[str, Any], response: Sequence[int]) -> DenseScores:
    """Scores from the answer to a `scoring_request`.

    Raises `ValueError` if the answer is not about exactly these response tokens.
    """
    meta = answer["meta_info"]
    # The first entry is the prompt's last token, for which SGLang gives no log-prob.
    entries = meta["input_token_logprobs"][1:]
    values, ids = _top_logprobs(meta)
    _require_tokens([entry[1] for entry in entries], response, int(ids.max(initial=0)))
    return DenseScores(
        logprobs=np.array([entry[0] for entry in entries], dtype=np.float64),
        top_ids=ids.astype(np.int64),
        top_logprobs=values.astype(np.float64),
    )


def recorded_scores(answer: Mapping[str, Any]) -> SparseScores:
    """The scores that the sampler recorded, from a generation's answer.

    The request must have asked for `return_logprob` and for `top_logprobs_num` of at least 1.
    Raises `ValueError` if it did not.
    """
    meta = answer["meta_info"]
    tokens = meta.get("output_token_logprobs")
    tops = meta.get("output_top_logprobs")
    if tokens is None or tops is None or any(row is None for row in tops):
        raise ValueError(
            "the answer holds no log-probs of its tokens: expected a request with"
            " return_logprob=True and top_logprobs_num of at least 1"
        )
    return SparseScores(
        logprobs=np.array([entry[0] for entry in tokens], dtype=np.float64),
        top_ids=np.array([[pair[1] for pair in row] for row in tops], dtype=np.int64),
        top_logprobs=np.array([[pair[0] for pair in row] for row in tops], dtype=np.float64),
    )


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


def _require_tokens(scored: Sequence[int], response: Sequence[int], largest_listed: int) -> None:
    # SGLang reports the vocabulary's last token as id 0 here (0.5.17), with the right log-prob. The
    # vocabulary size is not available over HTTP, but no id that occurs is above the last token's.
    last = max(largest_listed, *map(int, response))
    same = [a == int(b) or (a, int(b)) == (0, last) for a, b in zip(scored, response, strict=False)]
    if len(scored) != len(response) or not all(same):
        raise ValueError(
            f"the server scored {len(scored)} tokens that are not the response's {len(response)}:"
            " expected one log-prob per response token; is the target an SGLang 0.5.17 server?"
        )


def _top_logprobs(meta: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Log-probs and ids of the most probable tokens, both [T, top_k]."""
    if "input_top_logprobs_shape" in meta:
        rows, width = meta["input_top_logprobs_shape"]
        shape = (rows, width)
        return _decoded(meta, "val", "<f4", shape), _decoded(meta, "idx", "<i4", shape)
    # Until 0.5.16 there is a list for each token; the prompt's last token has none.
    pairs = np.array([[entry[:2] for entry in row] for row in meta["input_top_logprobs"][1:]])
    return pairs[..., 0], pairs[..., 1].astype(np.int64)


def _decoded(
    meta: Mapping[str, Any], kind: str, dtype: str, shape: tuple[int, int]
) -> NDArray[Any]:
    raw = base64.b64decode(meta[f"input_top_logprobs_{kind}_flat_b64"])
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
