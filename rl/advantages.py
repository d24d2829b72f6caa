"""Rewards of a group of samples -> advantages of its samples, relative to the group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.types import Rewards, known_rewards

_EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Advantages:
    """`values` holds one float64 array [n] per group. `in_loss` [n] are the responses that the loss
    takes: those with a reward, in groups where rewards differ."""

    values: tuple[NDArray[np.float64], ...]
    in_loss: tuple[NDArray[np.bool_], ...]

    def metrics(self) -> dict[str, float]:
        left_out = sum(not group.any() for group in self.in_loss)
        return {
            "sparrow/zero_std_groups": float(left_out),
            "sparrow/zero_std_fraction": left_out / len(self.in_loss),
        }


def group_advantages(rewards: Sequence[Rewards], std_normalisation: bool = True) -> Advantages:
    """Reward minus the group's mean, divided by the sample standard deviation (n - 1) + 1e-6 if
    configured, both over the known rewards."""
    parts = [_of_group(group, std_normalisation) for group in rewards]
    return Advantages(tuple(values for values, _ in parts), tuple(used for _, used in parts))


def _of_group(
    rewards: Rewards, std_normalisation: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    known, values = known_rewards(rewards), np.zeros(len(rewards))
    differ = len(set(known)) > 1
    used = np.array([reward is not None and differ for reward in rewards])
    if differ:
        values[used] = known - known.mean()
        if std_normalisation:
            values /= known.std(ddof=1) + _EPSILON
    return values, used
