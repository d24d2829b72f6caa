"""Responses turned into SGLang requests and back, and the interface of rollout engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.rl.types import ABORTED, Group, Prompt, Rollout, Segment


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


def sample_request(rollout: Rollout, sampling: Sampling, switchable: bool = True) -> dict[str, Any]:
    """Fields of SGLang's `GenerateReqInput` for the remaining tokens of a response. An engine
    without the sparrow backend is not `switchable`: it decodes densely anyway."""
    # All parameters are given, because a checkpoint's own generation defaults would truncate.
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens - len(rollout.response_ids),
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
        "input_ids": [*rollout.prompt_ids, *rollout.response_ids],
        "sampling_params": parameters,
        "return_logprob": True,
    }
    return request | ({"lora_path": sampling.adapter} if sampling.adapter else {})


def continued(
    rollout: Rollout,
    output: Mapping[str, Any],
    sampling: Sampling,
    weight_version: str,
    schedule: str,
    decode: Callable[[Sequence[int]], str],
    stopped: bool = False,
) -> Rollout:
    """`rollout` with SGLang's output for its `sample_request`. If requests were `stopped`, it may
    be aborted. Raises `RolloutError` if it was otherwise aborted, came from other weights than
    `weight_version`, or is shorter or longer than its finish reason says."""
    meta = output["meta_info"]
    recorded = [(value, token) for value, token, *_ in meta.get("output_token_logprobs") or []]
    finish = meta["finish_reason"] or {"type": "none"}
    before = len(rollout.response_ids)
    if not stopped or finish["type"] != ABORTED:
        problem = _problem(meta, len(recorded), sampling.max_new_tokens - before)
    else:
        # An abort hides whether the last token ends the response, so that token is dropped and
        # sampled once more.
        problem, recorded = None, recorded[:-1]
    if meta["weight_version"] != weight_version:
        problem = (
            f"weight_version={meta['weight_version']!r}: expected {weight_version!r}; weights must"
            " not change while responses are generated"
        )
    if problem:
        raise RolloutError(f"rollout {rollout.prompt_id!r}/{rollout.sample}: {problem}")
    ids = (*rollout.response_ids, *(token for _, token in recorded))
    logprobs = np.array([logprob for logprob, _ in recorded], dtype=np.float32)
    # SGLang does not report `num_retractions` of a request that is aborted in its queue. Of such
    # requests only a retracted one can have tokens.
    retracted = bool(meta.get("num_retractions", finish["type"] == ABORTED))
    cached = meta.get("cached_tokens", 0)
    rounds = meta.get("spec_verify_ct", 0)
    segment = Segment(before, len(ids), weight_version, schedule, cached, retracted, rounds)
    return replace(
        rollout,
        response_ids=ids,
        logprobs=np.concatenate([rollout.logprobs, logprobs]),
        finish_reason=finish["type"],
        weight_version=weight_version,
        schedule=schedule,
        # SGLang's covers this request alone, and hides thinking markers that are special tokens.
        text=decode(ids[:-1] if isinstance(finish.get("matched"), int) else ids),
        segments=(*rollout.segments, segment) if recorded else rollout.segments,
    )


def _problem(meta: Mapping[str, Any], length: int, limit: int) -> str | None:
    finish = meta["finish_reason"] or {"type": "none"}
    if finish["type"] not in ("stop", "length"):
        return f"finish_reason={finish['type']!r}: {finish.get('message') or 'no reason given'}"
    if length != meta["completion_tokens"]:
        return f"{length} log-probs for {meta['completion_tokens']} tokens"
    if not 0 < length <= limit or (finish["type"] == "length" and length != limit):
        return (
            f"{length} tokens with finish_reason={finish['type']!r}, max_new_tokens={limit}: the"
            " engine's context or KV pool has no room for more; lower max_new_tokens or raise"
            " context_length or max_total_tokens"
        )
    return None


@dataclass(frozen=True)
class Callbacks:
    """What a stream of groups calls.

    Attributes:
        on_finished: told the number of responses that have become complete since the last call.
        more_groups: additional groups, which take the next positions. The argument says whether no
            group is under way any more; if it returns none then, the stream ends.
        should_stop: whether to stop, and yield unfinished groups as they are.
    """

    on_finished: Callable[[int], object] = lambda count: None
    more_groups: Callable[[bool], Sequence[Group]] = lambda idle: ()
    should_stop: Callable[[], bool] = lambda: False


NO_CALLBACKS = Callbacks()


class RolloutEngine(Protocol):
    """Samples responses from the weights that it last received."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> list[Group]:
        """One group of `n` samples per prompt, in the order of the prompts; all or an error."""
        begun = [Group.begun(prompt, n) for prompt in prompts]
        groups = dict(self.stream(begun, sampling, callbacks))
        return [groups[position] for position in range(len(prompts))]

    def stream(
        self, groups: Sequence[Group], sampling: Sampling, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[tuple[int, Group]]:
        """Yields each group once it is finished, with its position in `groups`. Stopped responses
        are continued."""
        ...

    def release(self) -> None:
        """Give the device's memory to the trainer, if it is shared; weights may be discarded."""
        ...

    def resume(self) -> None:
        """Take the memory back; after a `release`, all weights must be loaded."""
        ...

    def close(self) -> None: ...
