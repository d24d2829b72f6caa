"""Gradients of a rollout adapter under other losses than that of `[distill]`, for comparison.

In: packed responses with their dense hidden states. Out: gradients of the adapter's factors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from sparrow_sglang.rl.config import DistillConfig
from sparrow_sglang.rl.distill import ADAPTER, SparseAdapter, exact_kl, summed, top_k_kl
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.optimizer import ClippedAdamW
from sparrow_sglang.rl.policy.packing import Packed
from sparrow_sglang.rl.policy.sparse_policy import SparseRule
from sparrow_sglang.schedule import BudgetSchedule

Targets = Sequence[tuple[Packed, torch.Tensor]]
"""Micro-batches, and the dense hidden states [n, H] of each in the memory of the CPU."""

MOST_KL = 1.0
"""KL in nats above which the "clamped" loss does not learn from a token."""
BAND = (0.3, 0.95)
"""Range of acceptance rates of the tokens from which the "band" loss learns."""


def forward_kl(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """KL(dense || sparse), [n] from logits [n, V]."""
    return exact_kl(dense, sparse)


def total_variation(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """1 - acceptance rate, [n] from logits [n, V]."""
    return (sparse.softmax(-1) - dense.softmax(-1)).abs().sum(-1) / 2


def clamped_kl(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """KL(sparse || dense), at most `MOST_KL`: [n] from logits [n, V]."""
    return exact_kl(sparse, dense).clamp(max=MOST_KL)


def band_kl(sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """KL(sparse || dense) of tokens whose acceptance rate lies in `BAND`, else 0: [n]."""
    alpha = 1 - total_variation(sparse, dense).detach()
    return exact_kl(sparse, dense) * ((alpha >= BAND[0]) & (alpha <= BAND[1]))


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "top_k": partial(top_k_kl, k=DistillConfig().top_k),
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "clamped": clamped_kl,
    "band": band_kl,
}


def add_gradients(
    loss: str,
    policy: DensePolicy,
    adapter: SparseAdapter,
    batch: Targets,
    schedule: BudgetSchedule,
    sparse_only: bool,
    rule_of: Callable[[BudgetSchedule, tuple[int, ...]], SparseRule] = SparseRule,
) -> None:
    """Add the gradients of one of `DIVERGENCES` to the adapter's factors.

    With `sparse_only` the adapter acts only on tokens that are decoded sparsely. `rule_of` makes
    the rule from the schedule and a micro-batch's prompt lengths.
    """
    tokens = sum(len(packed.targets) for packed, _ in batch)
    policy.model.train()
    with policy.frozen():
        for packed, dense in batch:
            with acting_on(policy, packed, schedule, sparse_only), adapter.enabled():
                sparse = policy.hidden(packed, rule_of(schedule, packed.prompt_lengths))
                target = dense.to(sparse.device)
                total = summed(DIVERGENCES[loss], sparse, target, policy.head, 1.0)
                (total / tokens).backward()


@contextmanager
def acting_on(
    policy: DensePolicy, packed: Packed, schedule: BudgetSchedule, sparse_only: bool
) -> Iterator[None]:
    """With `sparse_only`, zero the adapter's output at tokens that are not decoded sparsely."""
    with ExitStack() as hooks:
        if sparse_only:
            late = decoded_sparsely(packed, schedule)[:, None]

            def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
                return output * late

            for name, module in policy.model.named_modules():
                if name.endswith(f".lora_B.{ADAPTER}"):
                    hooks.callback(module.register_forward_hook(keep).remove)
        yield


def decoded_sparsely(packed: Packed, schedule: BudgetSchedule) -> torch.Tensor:
    """Which tokens of a pack are response tokens whose step leaves out a page: bool [T]."""
    cached = packed.positions.cpu().numpy() + 1
    prompts = np.repeat(packed.prompt_lengths, packed.lengths)
    late = (cached > prompts) & (schedule.tokens_read(cached) < cached)
    return torch.as_tensor(late, device=packed.positions.device)


def trained_factors(
    policy: DensePolicy, adapter: SparseAdapter, lr: float
) -> tuple[list[nn.Parameter], ClippedAdamW]:
    """The adapter's factors, and an optimizer over them like that of `[distill]`."""
    with policy.frozen(), adapter.enabled():
        factors = [p for p in policy.model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(factors, lr=lr, weight_decay=0.0)
    return factors, ClippedAdamW("adapter", factors, adamw, grad_clip=1.0)
