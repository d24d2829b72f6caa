"""What travels between the stages of a training step: prompts, their samples, and groups of them.

All are frozen. Token ids are plain tuples, so that they hash, compare and travel between
processes; log-probs are arrays, because there are many of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One task instance, rendered and tokenised.

    `payload` is what the task's reward needs besides the response (an answer, tests, ...): plain
    data that can be pickled. `id` is unique within the task.
    """

    id: str
    task: str
    input_ids: tuple[int, ...]
    payload: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `ValueError` on a prompt without tokens, which no engine can continue."""
        if not self.input_ids:
            raise ValueError(f"prompt {self.id!r} of task {self.task!r} has no tokens")


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response, as the sparse actor produced and recorded it.

    `logprobs` [T] are float32 natural log-probs of the T response tokens, of the distribution that
    they were sampled from. `sample` counts the samples of one prompt from 0. `weight_version` and
    `schedule` name the weights and the active KV budget schedule while it was generated; a response
    that spans a change of weights cannot be trained on. `finish_reason` is SGLang's: "stop" or
    "length".
    """

    prompt_id: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_version: str
    schedule: str
    text: str

    def __post_init__(self) -> None:
        """Raises `ValueError` unless there is one finite log-prob per response token."""
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        if logprobs.shape != (len(self.response_ids),) or not np.isfinite(logprobs).all():
            raise ValueError(
                f"rollout {self.prompt_id!r}/{self.sample}: logprobs of shape {logprobs.shape} for"
                f" {len(self.response_ids)} response tokens: expected one finite log-prob for each"
            )
        object.__setattr__(self, "logprobs", logprobs)

    @property
    def truncated(self) -> bool:
        """Whether the length limit ended the response."""
        return self.finish_reason == "length"


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt, in the order of `Rollout.sample`."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
