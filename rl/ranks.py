"""The processes of a run, one per GPU, and how they exchange values.

In: what each rank has computed from its share. Out: the same values on all ranks. A run of one
process has no process group, and every call returns what it was given.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

_Item = TypeVar("_Item")

# Ranks wait for the slowest rollout of all. The timeout need not detect a dead rank, as the process
# that started the ranks does.
_TIMEOUT = timedelta(days=1)
# The variables that say which rank a process is. An engine's processes, which inherit the
# environment, would take them for their own.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass(frozen=True)
class Ranks:
    """Process `rank` of `world`; several processes use torch's default process group."""

    rank: int = 0
    world: int = 1

    def share(self, items: Sequence[_Item]) -> list[_Item]:
        """Every `world`-th item, from number `rank` on."""
        return list(items[self.rank :: self.world])

    def each(self, value: _Item) -> list[_Item]:
        """The values of all ranks, by rank; anything that can be pickled."""
        values: list[_Item] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def gather(self, share: Sequence[_Item]) -> list[_Item]:
        """All items in their original order, from the part that `share` gave each rank."""
        shares = self.each(share)
        return [shares[i % self.world][i // self.world] for i in range(sum(map(len, shares)))]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over ranks, in place, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def total(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks by name; not every rank needs to have every name."""
        if self.world == 1:
            return dict(metrics)
        sums: defaultdict[str, float] = defaultdict(float)
        for part in self.each(metrics):
            for name, value in part.items():
                sums[name] += value
        return dict(sums)


ALONE = Ranks()
"""The only process of a run."""


def local_rank() -> int | None:
    """The number of this process among the ranks on this machine; None if it was started alone.

    Within `joined`, several ranks get None too, as `joined` removes the environment variable.
    """
    rank = os.environ.get("LOCAL_RANK")
    return None if rank is None else int(rank)


def see_own_gpu() -> int | None:
    """Restrict this rank to its own one of the visible GPUs; returns `local_rank`.

    Must be called before anything asks for GPUs.
    """
    if (rank := local_rank()) is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    elif rank < len(gpus := visible.split(",")):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    return rank


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that `sparrow train` started together with this process.

    Each rank must see only its own GPU.
    """
    if local_rank() is None or os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT
    )
    try:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
