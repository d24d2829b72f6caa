"""The clipped policy loss from log-probs, advantages and weights, summed over micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sparrow_sglang.rl.config import AlgorithmConfig
from sparrow_sglang.rl.correction import correct
from sparrow_sglang.rl.metrics import LOG_RATIO_BOUND


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


def token_shares(aggregation: str, lengths: Sequence[int]) -> torch.Tensor:
    """Factors fp32 [n] that turn a mean over n = sum of `lengths` into `aggregation`."""
    tokens = sum(lengths)
    if aggregation == "token_mean":
        return torch.ones(tokens)
    counts = torch.tensor(lengths)
    return (tokens / (len(lengths) * counts)).repeat_interleave(counts)


def kl_to_reference(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimates [n] of KL(policy || reference) at tokens of the policy: r - log r - 1 >= 0 with r =
    p_reference / p_policy (k3 of http://joschu.net/blog/kl-approx.html)."""
    log_ratio = (reference - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.exp() - log_ratio - 1


@dataclass(eq=False)
class MiniBatchLoss:
    """The loss of one optimizer step, called for each of its micro-batches. Tensors are [n], for
    the response tokens of the mini-batch; `lengths` [S] sum up to n. `dense_logprobs` are those of
    the policy when the batch began; None if it still is that policy: its forward pass then gives
    them, and `seen` [n] collects them. The correction does not apply to the KL term (as in verl and
    TRL). `metrics` add up over calls."""

    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    lengths: Sequence[int]
    settings: AlgorithmConfig
    dense_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = torch.zeros(len(self.advantages))
        self._shares = token_shares(self.settings.aggregation, self.lengths)
        counts = torch.tensor(self.lengths)
        self._owner = torch.arange(len(counts)).repeat_interleave(counts)

    def __call__(self, logprobs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The part of the loss from the tokens at `indices`, those of whole sequences; `logprobs`
        have gradient. NaN if any log-prob is not finite."""
        indices, device, settings = indices.cpu(), logprobs.device, self.settings
        self.seen[indices] = logprobs.detach().float().cpu()
        if not torch.isfinite(logprobs).all():
            return logprobs.sum() * torch.nan
        dense = (self.seen if self.dense_logprobs is None else self.dense_logprobs)[indices]
        lengths = self._owner[indices].unique_consecutive(return_counts=True)[1].tolist()
        weights = correct(dense, self.rollout_logprobs[indices], lengths, settings).weights
        shares = self._shares[indices].to(device)
        loss, metrics = policy_loss(
            logprobs,
            dense.to(device),
            self.advantages[indices].to(device),
            weights.to(device) * shares,
            len(self.advantages),
            settings,
        )
        if self.reference_logprobs is not None:
            divergence = kl_to_reference(logprobs, self.reference_logprobs[indices].to(device))
            kl = (divergence * shares).sum() / len(self.advantages)
            loss = loss + settings.kl_coefficient * kl
            metrics["actor/kl_loss"] = float(kl.detach())
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        return loss
