"""Optimizer steps with clipped gradients, which are not taken where a gradient is not finite."""

import logging
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn

from sparrow_sglang.rl.config import OptimizerConfig

logger = logging.getLogger(__name__)


class ClippedAdamW:
    """AdamW over `parameters` whose gradients are clipped to `grad_clip` together.

    `owner` is whom the log names. `skipped_in_a_row` counts the latest steps that were not taken.
    """

    def __init__(
        self,
        owner: str,
        parameters: Sequence[nn.Parameter],
        adamw: torch.optim.AdamW,
        grad_clip: float,
    ) -> None:
        self._owner = owner
        self._parameters = parameters
        self._adamw = adamw
        self._grad_clip = grad_clip
        self.skipped_in_a_row = 0

    def step(self) -> float:
        """One step, if the gradient is finite; returns its norm before clipping, and forgets it.

        A gradient that is not finite is logged, and parameters and moments stay as they are.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        if isfinite(norm):
            self._adamw.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
            logger.warning(
                "the %s's gradient norm is %s: no step was taken with it", self._owner, norm
            )
        self._adamw.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Moments and counts of steps."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._adamw.load_state_dict(state)


def adamw(
    parameters: Sequence[nn.Parameter], settings: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW as configured, without weight decay on vectors such as norms and biases."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        fused=device.type == "cuda" or settings.offload,
    )


def add_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    """Move the gradient of a micro-batch into the fp32 sum of `master`.

    Summed in bf16, whose 8 bits hold no addend below a 256th of the sum, many micro-batches would
    lose most of their share.
    """
    assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
    gradient = parameter.grad.to(master.device)
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
    parameter.grad = None
