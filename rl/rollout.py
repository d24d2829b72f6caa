"""A step's prompts to SGLang requests, and SGLang's answers to groups, checked.

In: prompts, sampling parameters and SGLang's output dicts. Out: `Group`s whose token ids and
log-probs are those that the sampler recorded.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.rl.types import Group, Prompt, Rollout

DENSE = "dense"
"""Name of the schedule that reads all of the KV cache."""


class RolloutError(SparrowError, RuntimeError):
    """An engine's answer cannot be trained on; the message says which and why."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: from the whole vocabulary, without penalties.

    Log-probs are recorded at `temperature`; 0 is greedy, nothing to train on. `dense` reads all of
    the KV cache whatever the engine's schedule says, as in evaluation. `adapter` names a loaded
    LoRA adapter.
    """

    max_new_tokens: int
    temperature: float = 1.0
    dense: bool = False
    adapter: str | None = None


def prompts_of_step(
    prompts: Sequence[Prompt], count: int, step: int, seed: int, replaced: int = 0
) -> list[Prompt]:
    """The `count` prompts of `step`, counted from 0; earlier steps took `replaced` further ones.

    Every prompt is used once before any is used again, in a new order each time, so that a run
    that resumes goes on where it was without anything saved but `replaced`.
    """
    first = step * count + replaced
    places = range(first, first + count)
    size = len(prompts)
    return [prompts[_order(size, seed, place // size)[place % size]] for place in places]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def sample_request(prompt: Prompt, sampling: Sampling, switchable: bool = True) -> dict[str, Any]:
    """Fields of SGLang's `GenerateReqInput` for one sample of a prompt.

    An engine without the sparrow backend is not `switchable`: dense at any rate, and not told so.
    """
    # All of them given, because a checkpoint's own generation defaults would truncate.
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.dense and switchable:
        parameters["custom_params"] = {"sparrow": {"dense": True}}
    request = {
        "input_ids": list(prompt.input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
    }
    return request | ({"lora_path": sampling.adapter} if sampling.adapter else {})


def to_group(
    prompt: Prompt,
    answers: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    weight_version: str,
    schedule: str,
) -> Group:
    """The group of one prompt from SGLang's answers to its request, one per sample.

    Raises:
        RolloutError: a response was aborted, came from other weights than `weight_version`, or is
            shorter or longer than its finish reason says.
    """
    rollouts = []
    for sample, answer in enumerate(answers):
        meta = answer["meta_info"]
        recorded = meta["output_token_logprobs"]
        finish = meta["finish_reason"]
        problem = _problem(meta, len(recorded), sampling, weight_version)
        if problem:
            raise RolloutError(f"rollout {prompt.id!r}/{sample}: {problem}")
        rollouts.append(
            Rollout(
                prompt_id=prompt.id,
                sample=sample,
                prompt_ids=prompt.input_ids,
                response_ids=tuple(token for _, token, *_ in recorded),
                logprobs=np.array([logprob for logprob, *_ in recorded], dtype=np.float32),
                finish_reason=finish["type"],
                weight_version=weight_version,
                schedule=schedule,
                # Absent from engines without a tokenizer.
                text=answer.get("text", ""),
            )
        )
    return Group(prompt, tuple(rollouts))


def _problem(
    meta: Mapping[str, Any], length: int, sampling: Sampling, weight_version: str
) -> str | None:
    finish = meta["finish_reason"] or {"type": "none"}
    if finish["type"] not in ("stop", "length"):
        return f"finish_reason={finish['type']!r}: {finish.get('message') or 'no reason given'}"
    if meta["weight_version"] != weight_version:
        return (
            f"weight_version={meta['weight_version']!r}: expected {weight_version!r}; weights must"
            " not change while responses are generated"
        )
    if length != meta["completion_tokens"]:
        return f"{length} log-probs for {meta['completion_tokens']} tokens"
    limit = sampling.max_new_tokens
    if not 0 < length <= limit or (finish["type"] == "length" and length != limit):
        return (
            f"{length} tokens with finish_reason={finish['type']!r}, max_new_tokens={limit}: the"
            " engine's context or KV pool has no room for more; lower max_new_tokens or raise"
            " context_length or max_total_tokens"
        )
    return None
