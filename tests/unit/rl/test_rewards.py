"""Rewards without the processes that compute them."""

import numpy as np
import pytest
from reward_groups import group, obey

from sparrow_sglang.rl.tasks.rewards import RewardPool, without_truncated
from sparrow_sglang.rl.types import Group, Prompt


def test_truncated_responses_lose_their_reward() -> None:
    rollouts = (*group("a", 0.0, ["1", "2"]).rollouts, *group("a", 0.0, ["3"], "length").rollouts)
    mixed = Group(Prompt("a", "test", (1,)), rollouts)
    penalised = without_truncated(
        [np.array([1.0, 0.5, 1.0]), np.array([3.0])], [mixed, group("b", 0.0, ["1"])]
    )
    assert [rewards.tolist() for rewards in penalised] == [[1.0, 0.5, 0.0], [3.0]]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        RewardPool(obey, workers=0)
