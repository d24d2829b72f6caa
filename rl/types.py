"""Data that the stages of a training step exchange: prompts, rollouts and groups of rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """`payload` is what the reward needs besides the response, plain data that can be pickled. `id`
    is unique within the task. Raises `ValueError` on a prompt without tokens."""

    id: str
    task: str
    input_ids: tuple[int, ...]
    payload: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError(f"prompt {self.id!r} of task {self.task!r} has no tokens")


ABORTED = "abort"
"""The `finish_reason` of a response that is not finished."""


@dataclass(frozen=True)
class Segment:
    """Response tokens [start, end) of one request to the engine. All before `start` was prefilled
    densely, except for `cached` tokens; the segment was decoded under `schedule` from the weights
    `weight_version`. A `retracted` request later prefilled some of these tokens as well, unknown
    which. Lossless decoding took so many `rounds`."""

    start: int
    end: int
    weight_version: str
    schedule: str
    cached: int = 0
    retracted: bool = False
    rounds: int = 0


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response. `logprobs` [T] are float32 natural log-probs of the distribution that
    the tokens were sampled from. `weight_version` and `schedule` are those of the last tokens.
    `finish_reason` is SGLang's; "abort" is to be continued. `segments` cover the tokens, in order;
    by default one. Raises `ValueError` unless there is one finite log-prob per token."""

    prompt_id: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_version: str
    schedule: str
    text: str
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not self.segments and self.response_ids:
            whole = Segment(0, len(self.response_ids), self.weight_version, self.schedule)
            object.__setattr__(self, "segments", (whole,))
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        count = len(self.response_ids)
        if logprobs.shape != (count,) or not np.isfinite(logprobs).all():
            raise ValueError(
                f"rollout {self.prompt_id!r}/{self.sample}: logprobs {logprobs.shape}, expected one"
                f" finite log-prob for each of {count} tokens"
            )
        object.__setattr__(self, "logprobs", logprobs)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def finished(self) -> bool:
        return self.finish_reason != ABORTED

    @property
    def retracted(self) -> bool:
        return any(segment.retracted for segment in self.segments)

    def cut(self, limit: int) -> "Rollout":
        """Truncated if it is unfinished and has `limit` tokens."""
        if self.finished or len(self.response_ids) < limit:
            return self
        return replace(self, finish_reason="length")

    def split(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Token ids of each segment: all that precedes it, prompt included, and its own."""
        ids, first = (*self.prompt_ids, *self.response_ids), len(self.prompt_ids)
        return [
            (ids[: first + segment.start], ids[first + segment.start : first + segment.end])
            for segment in self.segments
        ]


Rewards = tuple[float | None, ...]
"""Rewards of a group's responses, in their order; None where scoring failed."""


def known_rewards(rewards: Rewards) -> NDArray[np.float64]:
    return np.array([reward for reward in rewards if reward is not None], np.float64)


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt, in the order of `Rollout.sample`."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @classmethod
    def begun(cls, prompt: Prompt, samples: int) -> Self:
        none = np.empty(0, np.float32)
        rollouts = (
            Rollout(prompt.id, sample, prompt.input_ids, (), none, ABORTED, "", "", "")
            for sample in range(samples)
        )
        return cls(prompt, tuple(rollouts))

    def cut(self, limit: int) -> "Group":
        return replace(self, rollouts=tuple(rollout.cut(limit) for rollout in self.rollouts))

    @property
    def finished(self) -> bool:
        return all(rollout.finished for rollout in self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(len(rollout.response_ids) for rollout in self.rollouts)
