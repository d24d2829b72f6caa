"""Rewards of a group of samples -> advantages of its samples, relative to the group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Advantages:
    """Advantages of a batch of groups.

    `values` holds one float64 array [n] per group. `in_loss` says which groups the loss takes: all
    but the zero-advantage groups, in which all samples earned the same reward.
    """

    values: tuple[NDArray[np.float64], ...]
    in_loss: tuple[bool, ...]

    def metrics(self) -> dict[str, float]:
        """Number and share of groups left out of the loss."""
        left_out = self.in_loss.count(False)
        return {
            "sparrow/zero_std_groups": float(left_out),
            "sparrow/zero_std_fraction": left_out / len(self.in_loss),
        }


def group_advantages(rewards: Sequence[ArrayLike], std_normalisation: bool = True) -> Advantages:
    """Reward minus the group's mean, divided by the group's standard deviation + 1e-6 if asked.

    `rewards` holds one array [n] per group; the standard deviation is the sample's (n - 1). Raises
    `ValueError` on no groups, on groups of fewer than two samples and on rewards that are not
    finite.
    """
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    if not groups:
        raise ValueError("rewards hold no groups: expected at least one")
    for index, group in enumerate(groups):
        if group.ndim != 1 or group.size < 2 or not np.isfinite(group).all():
            raise ValueError(
                f"rewards[{index}]={group.tolist()}: expected two or more finite rewards, one for"
                " each sample of the prompt"
            )
    in_loss = tuple(bool(group.max() > group.min()) for group in groups)
    values = tuple(
        _relative(group, std_normalisation) if used else np.zeros_like(group)
        for group, used in zip(groups, in_loss, strict=True)
    )
    return Advantages(values, in_loss)


def _relative(rewards: NDArray[np.float64], std_normalisation: bool) -> NDArray[np.float64]:
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + _EPSILON) if std_normalisation else centred
