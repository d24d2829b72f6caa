"""Responses turned into SGLang requests and back, and the interface of rollout engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.rl.types import Group, Prompt, Rollout


class RolloutError(SparrowError, RuntimeError):
    """A response cannot be trained on; the message says which and why."""


class EngineDied(SparrowError, RuntimeError):
    """A process of an engine has ended, or an engine does not respond."""


class EngineNotStarted(EngineDied):
    """An engine did not start, and a retry would fail, too."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Log-probs are recorded at `temperature`; 0 is greedy. `dense`
    ignores the engine's schedule. `adapter` names a loaded LoRA adapter. `top_p` and `top_k` are
    for evaluation: SGLang records log-probs over all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    dense: bool = False
    adapter: str | None = None
    top_p: float = 1.0
    top_k: int = -1
    timeout_s: float = 7200.0


def sample_request(
    input_ids: Sequence[int], sampling: Sampling, switchable: bool = True
) -> dict[str, Any]:
    """Fields of SGLang's `GenerateReqInput`. An engine without the sparrow backend is not
    `switchable`: it decodes densely anyway."""
    # All parameters are given, because a checkpoint's own generation defaults would truncate.
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.dense and switchable:
        parameters["custom_params"] = {"sparrow": {"dense": True}}
    request = {
        "input_ids": list(input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
    }
    return request | ({"lora_path": sampling.adapter} if sampling.adapter else {})


def sampled(
    prompt: Prompt,
    sample: int,
    output: Mapping[str, Any],
    sampling: Sampling,
    weight_version: str,
    schedule: str,
    decode: Callable[[Sequence[int]], str],
) -> Rollout:
    """Sample number `sample` of a prompt, from SGLang's output for its `sample_request`. Raises
    `RolloutError` if it was aborted, came from other weights than `weight_version`, has log-probs
    that are not finite, or is shorter or longer than its finish reason says."""
    meta = output["meta_info"]
    recorded = [(value, token) for value, token, *_ in meta.get("output_token_logprobs") or []]
    finish = meta["finish_reason"] or {"type": "none"}
    logprobs = np.array([logprob for logprob, _ in recorded], dtype=np.float32)
    problem = _problem(meta, finish, logprobs, sampling.max_new_tokens, weight_version)
    if problem:
        raise RolloutError(f"rollout {prompt.id!r}/{sample}: {problem}")
    ids = tuple(token for _, token in recorded)
    return Rollout(
        prompt.id,
        sample,
        prompt.input_ids,
        ids,
        logprobs,
        finish["type"],
        weight_version,
        schedule,
        # SGLang's hides thinking markers that are special tokens.
        decode(ids[:-1] if isinstance(finish.get("matched"), int) else ids),
        retracted=bool(meta.get("num_retractions")),
        rounds=meta.get("spec_verify_ct", 0),
    )


def _problem(
    meta: Mapping[str, Any],
    finish: Mapping[str, Any],
    logprobs: NDArray[np.float32],
    limit: int,
    weight_version: str,
) -> str | None:
    length = len(logprobs)
    if meta["weight_version"] != weight_version:
        return (
            f"weight_version={meta['weight_version']!r}: expected {weight_version!r}; weights must"
            " not change while responses are generated"
        )
    if finish["type"] not in ("stop", "length"):
        return f"finish_reason={finish['type']!r}: {finish.get('message') or 'no reason given'}"
    if length != meta["completion_tokens"]:
        return f"{length} log-probs for {meta['completion_tokens']} tokens"
    if not np.isfinite(logprobs).all():
        return "log-probs are not finite: expected finite weights"
    if not 0 < length <= limit or (finish["type"] == "length" and length != limit):
        return (
            f"{length} tokens with finish_reason={finish['type']!r}, max_new_tokens={limit}: the"
            " engine's context or KV pool has no room for more; lower max_new_tokens or raise"
            " context_length or max_total_tokens"
        )
    return None


class RolloutEngine(Protocol):
    """Samples responses from the weights that it last received."""

    def stream(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling
    ) -> Iterator[tuple[int, Group]]:
        """Yields each prompt's group of `n` samples once it is complete, with the prompt's
        position."""
        ...

    def release(self) -> None:
        """Give the device's memory to the trainer, if it is shared; weights may be discarded."""
        ...

    def resume(self) -> None:
        """Take the memory back; after a `release`, all weights must be loaded."""
        ...

    def close(self) -> None: ...
