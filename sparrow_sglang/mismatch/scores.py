"""Log-probs and top-k lists of a response, and how to have an SGLang server compute them densely.

Prefill is dense, so a request that prefills prompt and response and generates nothing gives the
dense distributions of the weights that generated them. Imports neither torch nor SGLang.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOP_K = 20


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


class DenseScores(Scores):
    """Scores under full attention."""


class SparseScores(Scores):
    """Scores that were recorded by the sparse decode that sampled the tokens."""


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
        raise ValueError("expected a request with return_logprob=True and top_logprobs_num >= 1")
    return SparseScores(
        logprobs=np.array([entry[0] for entry in tokens], dtype=np.float64),
        top_ids=np.array([[pair[1] for pair in row] for row in tops], dtype=np.int64),
        top_logprobs=np.array([[pair[0] for pair in row] for row in tops], dtype=np.float64),
    )


def _require_tokens(scored: Sequence[int], response: Sequence[int], largest_listed: int) -> None:
    # SGLang reports the vocabulary's last token as id 0 here, with the right log-prob. The
    # vocabulary size is not available over HTTP, but no id that occurs is above the last token's.
    last = max(largest_listed, *map(int, response))
    same = [a == int(b) or (a, int(b)) == (0, last) for a, b in zip(scored, response, strict=False)]
    if len(scored) != len(response) or not all(same):
        raise ValueError(
            f"the server scored {len(scored)} tokens: expected the response's {len(response)}"
        )


def _top_logprobs(meta: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Log-probs and ids, both [T, top_k]."""
    if "input_top_logprobs_shape" in meta:
        rows, width = meta["input_top_logprobs_shape"]
        shape = (rows, width)
        return _decoded(meta, "val", "<f4", shape), _decoded(meta, "idx", "<i4", shape)
    # In 0.5.15 there is a list for each token; the prompt's last token has none.
    pairs = np.array([[entry[:2] for entry in row] for row in meta["input_top_logprobs"][1:]])
    return pairs[..., 0], pairs[..., 1].astype(np.int64)


def _decoded(
    meta: Mapping[str, Any], kind: str, dtype: str, shape: tuple[int, int]
) -> NDArray[Any]:
    raw = base64.b64decode(meta[f"input_top_logprobs_{kind}_flat_b64"])
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
