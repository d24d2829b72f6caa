"""Optimizer steps with clipped gradients; a step is skipped if its gradient is not finite."""

import logging
from collections.abc import Sequence
from math import cos, inf, isfinite, pi
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sparrow_sglang.rl.config import OptimizerConfig
from sparrow_sglang.rl.policy.shards import ALONE, Ranks, local

MOMENTS = ("exp_avg", "exp_avg_sq", "step")

logger = logging.getLogger(__name__)


class ClippedAdamW(torch.optim.AdamW):
    """AdamW over `parameters`, this rank's shards, with gradients clipped to a joint norm of
    `grad_clip`; no weight decay of vectors. `owner` names the parameters in log messages.
    `skipped_in_a_row` counts steps skipped since the last one taken."""

    def __init__(
        self,
        owner: str,
        parameters: Sequence[nn.Parameter],
        grad_clip: float,
        ranks: Ranks = ALONE,
        *,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        super().__init__(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            **settings,
        )
        self._owner = owner
        self._parameters = parameters
        self._grad_clip = grad_clip
        self._ranks = ranks
        self.skipped_in_a_row = 0
        # AdamW would allocate these zeros in its first step, when an engine on the same GPU has
        # sized its KV cache by the memory that was free.
        self.load_moments(
            [
                {name: torch.zeros_like(p.detach()) for name in MOMENTS} | {"step": torch.zeros(())}
                for p in parameters
            ]
        )

    def clipped_step(self) -> float:
        """Skips a gradient that is not finite; returns its norm before clipping."""
        total = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self._ranks.world > 1:
            total = self._ranks.all_reduce(total.square()).sqrt()
        clip_grads_with_norm_(self._parameters, self._grad_clip, total)
        norm = float(total)
        if isfinite(norm):
            self.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
            logger.warning(
                "the %s's gradient norm is %s: no step was taken with it", self._owner, norm
            )
        self.zero_grad()
        return norm

    def is_finite(self) -> bool:
        """Whether weights and moments are, on all ranks."""
        state = [value for moments in self.moments() for value in moments.values()]
        largest = get_total_norm(
            [one.detach() for one in (*self._parameters, *state) if one.numel()], inf
        )
        return bool(self._ranks.all_reduce(largest).isfinite())

    def moments(self) -> list[dict[str, torch.Tensor]]:
        return [{name: self.state[p][name] for name in MOMENTS} for p in self._parameters]

    def load_moments(self, moments: Sequence[dict[str, torch.Tensor]]) -> None:
        by_parameter = dict(zip(self._parameters, moments, strict=True))
        ordered = [by_parameter[p] for group in self.param_groups for p in group["params"]]
        self.load_state_dict({**self.state_dict(), "state": dict(enumerate(ordered))})


def learning_rate(settings: OptimizerConfig, step: int, steps: int) -> float:
    """Of training step `step`, counted from 0. With a warm-up of w steps, step w - 1 is the first
    at `lr`; the decay reaches its end after the last step."""
    warmup, final = settings.warmup_steps, settings.final_lr_share
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}
    share = left[settings.decay]
    return settings.lr * (share + final * (1 - share))


def add_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    """Into an fp32 sum: a bf16 sum would drop addends below a 256th of it."""
    assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
    gradient = local(parameter.grad).to(master.device)
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
    parameter.grad = None
