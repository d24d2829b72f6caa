"""Data that the stages of a training step exchange: prompts, rollouts and groups of rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response. `logprobs` [T] are float32 natural log-probs of the distribution that
    the tokens were sampled from, by weights `weight_version` under `schedule`. `finish_reason` is
    SGLang's. A `retracted` request later prefilled some of its tokens, unknown which. Lossless
    decoding took so many `rounds`."""

    prompt_id: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_version: str
    schedule: str
    text: str
    retracted: bool = False
    rounds: int = 0

    def __post_init__(self) -> None:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        assert logprobs.shape == (len(self.response_ids),), "there is one log-prob per token"
        object.__setattr__(self, "logprobs", logprobs)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


Rewards = tuple[float | None, ...]
"""Rewards of a group's responses, in their order; None where scoring failed."""


def known_rewards(rewards: Rewards) -> NDArray[np.float64]:
    return np.array([reward for reward in rewards if reward is not None], np.float64)


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt, in the order of `Rollout.sample`."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def tokens(self) -> int:
        return sum(len(rollout.response_ids) for rollout in self.rollouts)
