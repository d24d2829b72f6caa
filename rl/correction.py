"""How the loss corrects for tokens that the sparse actor sampled, not the dense policy."""

from collections.abc import Sequence

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
