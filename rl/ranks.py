"""The trainer workers of a run, one per GPU, and their collective calls."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Ranks:
    """Process `rank` of `world`; several processes use torch's default process group."""

    rank: int = 0
    world: int = 1

    def all_gather(self, value: _Item) -> list[_Item]:
        """The values of all ranks, by rank; anything that can be pickled."""
        values: list[_Item] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over ranks, in place, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def total(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Sums by name over ranks, of which some may lack a name."""
        if self.world == 1:
            return dict(metrics)
        sums: defaultdict[str, float] = defaultdict(float)
        for part in self.all_gather(metrics):
            for name, value in part.items():
                sums[name] += value
        return dict(sums)


ALONE = Ranks()
"""The only process of a run."""
