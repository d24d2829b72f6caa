"""What the ways to collect a step's groups have in common: their inputs, result and rewards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.config import RolloutConfig
from sparrow_sglang.rl.engines.responses import OnFinished
from sparrow_sglang.rl.rollout import prompts_from
from sparrow_sglang.rl.sparse_actor import SparseActor
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Group, Prompt


@dataclass(frozen=True, eq=False)
class Collected:
    """As many `groups` as the step has prompts, with `rewards` [n] float64 and sub-scores of each.

    Rewards include the penalties of `RolloutConfig`. `tokens` counts all response tokens that were
    sampled, `replaced` the groups that were replaced by others. The groups `carried` are continued
    in the next step.
    """

    groups: list[Group]
    rewards: tuple[NDArray[np.float64], ...]
    parts: tuple[tuple[Mapping[str, float], ...], ...]
    metrics: dict[str, float]
    tokens: int
    replaced: int = 0
    carried: tuple[Group, ...] = ()


@dataclass(frozen=True, eq=False)
class Collector:
    """What a step's groups are collected with.

    `prompts` are those of the run, in an order that depends on `seed`. `clock(stage)` is a context
    that takes the time of a stage. `counter(stage, responses)` returns a function to call with the
    number of responses that have become complete.
    """

    settings: RolloutConfig
    prompts: Sequence[Prompt]
    seed: int
    actor: SparseActor
    reward_workers: RewardPool
    clock: Callable[[str], AbstractContextManager[None]]
    counter: Callable[[str, int], OnFinished]

    def count_finished(self) -> OnFinished:
        """A function that counts the step's responses as they become complete."""
        samples = self.settings.prompts_per_step * self.settings.samples_per_prompt
        return self.counter("rollout", samples)

    def prompts_from(self, first: int, count: int) -> list[Prompt]:
        """`count` prompts in the order of the data, from the run's prompt number `first` on."""
        return prompts_from(self.prompts, first, count, self.seed)

    def begin(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Groups of responses without tokens."""
        return [Group.begun(one, self.settings.samples_per_prompt) for one in prompts]


def with_penalties(
    settings: RolloutConfig, rewards: Sequence[NDArray[np.float64]], groups: Sequence[Group]
) -> tuple[NDArray[np.float64], ...]:
    """The rewards [n] of each group that advantages are computed from.

    With `truncated = "penalty"` truncated responses have reward 0. The last `overlong_tokens`
    before `max_new_tokens` lower a reward linearly by up to `overlong_penalty` (DAPO's soft
    overlong punishment, arXiv:2503.14476, equation 13).
    """
    return tuple(
        _with_penalties(settings, values, group)
        for values, group in zip(rewards, groups, strict=True)
    )


def _with_penalties(
    settings: RolloutConfig, rewards: NDArray[np.float64], group: Group
) -> NDArray[np.float64]:
    if settings.truncated == "penalty":
        rewards = np.where([rollout.truncated for rollout in group.rollouts], 0.0, rewards)
    if settings.overlong_tokens:
        lengths = np.array([len(rollout.response_ids) for rollout in group.rollouts])
        beyond = lengths - (settings.max_new_tokens - settings.overlong_tokens)
        rewards = rewards - settings.overlong_penalty * np.clip(
            beyond / settings.overlong_tokens, 0, 1
        )
    return rewards


def count_tokens(groups: Sequence[Group]) -> int:
    """Response tokens sampled so far."""
    return sum(group.tokens for group in groups)
