"""The trainer workers of a run, one per GPU: their collective calls, and a model sharded over them
by FSDP2. Gradients are reduced after each micro-batch, so that no rank ever holds all."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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


class Sharded(nn.Module):
    """The root module of FSDP; its forward runs a given function, while parameters outside of
    layers are gathered. The model's own forward would not do: the projection, which may be the
    embeddings, is used after it."""

    def __init__(self, model: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
        """Moves the model to `device`, layer by layer, so that it need not fit there as a whole."""
        super().__init__()
        self.model = model
        mesh = init_device_mesh(device.type, (ranks.world,))
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for module in (*layers, self):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=True,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            )

    def forward(self, compute: Callable[[], _Result]) -> _Result:
        return compute()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, in the same memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All rows, a collective call on all ranks; the tensor itself if it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_chunk(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return full
    parts, rank = full.chunk(tensor.device_mesh.size()), tensor.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else full[:0]


def as_dtensor_like(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's `rows`, on any device, as a tensor that is sharded as `tensor`, if that is."""
    if not isinstance(tensor, DTensor):
        return rows
    mesh = init_device_mesh(rows.device.type, (tensor.device_mesh.size(),))
    return DTensor.from_local(
        rows, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
