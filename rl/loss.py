"""The clipped policy loss, summed over micro-batches, and its correction for tokens that the sparse
actor sampled, not the dense policy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sparrow_sglang.rl.config import AlgorithmConfig
from sparrow_sglang.rl.metrics import LOG_RATIO_BOUND, importance_metrics, mismatch_metrics


def importance_weights(
    dense: torch.Tensor, rollout: torch.Tensor, settings: AlgorithmConfig
) -> torch.Tensor:
    """Weights [N] fp32, without gradient, of tokens with log-probs `dense` and `rollout` [N]. With
    `correction` "none" they are 1, which is biased where sparse actor and dense policy differ; with
    "tis", truncated importance sampling, min(p_dense / p_rollout, tis_cap)."""
    if settings.correction == "none":
        return torch.ones_like(dense, dtype=torch.float32)
    return _ratio(dense, rollout).clamp(max=settings.tis_cap).float()


def correction_metrics(
    dense: torch.Tensor, rollout: torch.Tensor, lengths: Sequence[int], settings: AlgorithmConfig
) -> dict[str, float]:
    """`mismatch_metrics` and those of the weights; log-probs are [N], of responses of `lengths`."""
    mismatch = mismatch_metrics(dense.double(), rollout.double(), lengths)
    if settings.correction == "none":
        return mismatch
    ratio, cap = _ratio(dense, rollout), settings.tis_cap
    return mismatch | importance_metrics(ratio.clamp(max=cap), ratio, 1 / cap, cap)


def _ratio(dense: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    log_ratio = dense.detach().double() - rollout.detach().double()
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    batch_tokens: int,
    settings: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum over tokens of weight x clipped loss, divided by `batch_tokens`, the response tokens of
    all micro-batches of one optimizer step. All tensors are [n], for the tokens of one micro-batch;
    `logprobs` alone have a gradient. With r = exp(logprobs - old_logprobs), a token's loss is
    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) and at most -A dual_clip where A < 0 (PPO
    with the decoupled range of DAPO and the dual clip of arXiv:1912.09729). Returns the loss, with
    gradient, and metrics, which add up over micro-batches."""
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    upper = torch.maximum(plain, clipped)
    ceiling = -advantages * settings.dual_clip
    at_ceiling = (advantages < 0) & (upper > ceiling)
    tokens = torch.where(at_ceiling, ceiling, upper)
    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": float((clipped > plain).sum()) / batch_tokens,
            "actor/pg_clipfrac_lower": float(at_ceiling.sum()) / batch_tokens,
            "actor/ppo_kl": -float(log_ratio.sum()) / batch_tokens,
        }
    loss = (tokens * weights).sum() / batch_tokens
    metrics["actor/pg_loss"] = float(loss.detach())
    return loss, metrics


@dataclass(eq=False)
class MiniBatchLoss:
    """The loss of one optimizer step, called for each of its micro-batches. Tensors are [n], for
    the response tokens of the mini-batch. `dense_logprobs` are those of the policy when the batch
    began; None if it still is that policy: its forward pass then gives them, and `seen` [n]
    collects them. `metrics` add up over calls."""

    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    settings: AlgorithmConfig
    dense_logprobs: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = torch.zeros(len(self.advantages))

    def __call__(self, logprobs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The part of the loss from the tokens at `indices`; `logprobs` have gradient. NaN if any
        log-prob is not finite."""
        indices, device = indices.cpu(), logprobs.device
        self.seen[indices] = logprobs.detach().float().cpu()
        if not torch.isfinite(logprobs).all():
            return logprobs.sum() * torch.nan
        dense = (self.seen if self.dense_logprobs is None else self.dense_logprobs)[indices]
        weights = importance_weights(dense, self.rollout_logprobs[indices], self.settings)
        loss, metrics = policy_loss(
            logprobs,
            dense.to(device),
            self.advantages[indices].to(device),
            weights.to(device),
            len(self.advantages),
            self.settings,
        )
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        return loss
