"""Rewards without the processes that compute them."""

import pytest
from reward_groups import obey

from sparrow_sglang.rl.tasks.rewards import RewardPool


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        RewardPool(obey, workers=0)
