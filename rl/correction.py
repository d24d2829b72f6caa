"""How the loss corrects for tokens that the sparse actor sampled, not the dense policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparrow_sglang.rl.config import AlgorithmConfig
from sparrow_sglang.rl.metrics import (
    LOG_RATIO_BOUND,
    importance_metrics,
    mismatch_metrics,
    sequence_sums,
)


@dataclass(frozen=True, eq=False)
class Correction:
    """`weights` [N] fp32, without gradient; a token of weight 0 still counts in the loss's mean."""

    weights: torch.Tensor
    metrics: dict[str, float]


Correct = Callable[[torch.Tensor, Sequence[int], AlgorithmConfig], Correction]
"""(log ratio dense - rollout [N] float64, response lengths [S] with sum N, settings)."""


def none(log_ratio: torch.Tensor, lengths: Sequence[int], settings: AlgorithmConfig) -> Correction:
    """Weight 1: the plain policy gradient, biased where sparse actor and dense policy differ."""
    return Correction(torch.ones_like(log_ratio, dtype=torch.float32), {})


def tis(log_ratio: torch.Tensor, lengths: Sequence[int], settings: AlgorithmConfig) -> Correction:
    """Truncated importance sampling: min(ratio, tis_cap) per token."""
    ratio, cap = _ratio(log_ratio), settings.tis_cap
    weights = ratio.clamp(max=cap)
    return Correction(weights.float(), importance_metrics(weights, ratio, 1 / cap, cap))


def mask(log_ratio: torch.Tensor, lengths: Sequence[int], settings: AlgorithmConfig) -> Correction:
    """The ratio itself if it lies in [mask_low, mask_high], otherwise 0."""
    ratio = _ratio(log_ratio)
    low, high = settings.mask_low, settings.mask_high
    in_range = (ratio >= low) & (ratio <= high)
    weights = torch.where(in_range, ratio, 0.0)
    metrics = importance_metrics(weights, ratio, low, high)
    metrics["rollout_corr/rollout_is_oob_ratio"] = 1.0 - float(in_range.double().mean())
    return Correction(weights.float(), metrics)


def sequence(
    log_ratio: torch.Tensor, lengths: Sequence[int], settings: AlgorithmConfig
) -> Correction:
    """min(geometric mean of a response's ratios, sequence_cap), the same for all of its tokens.
    Unlike their product, the unbiased weight, it neither vanishes nor explodes with length (slime's
    `mis_level: geometric`). A response with a token whose ratio is below sequence_veto has weight
    0: the mean would hide a token that the dense policy cannot have drawn (verl's
    `rollout_token_veto_threshold`, slime's `mis_veto_threshold`)."""
    counts = torch.as_tensor(lengths, device=log_ratio.device)
    cap, veto = settings.sequence_cap, settings.sequence_veto
    ratio = _ratio(sequence_sums(log_ratio, lengths) / counts)
    # The veto uses exact log-ratios, as clamping to LOG_RATIO_BOUND would hide the smallest.
    vetoed = sequence_sums((log_ratio.exp() < veto).double(), lengths) > 0
    weights = torch.where(vetoed, 0.0, ratio.clamp(max=cap)).repeat_interleave(counts)
    # Under names of ours, as verl's weight of a sequence is the product of its ratios.
    metrics = {
        "sparrow/sequence_is_mean": float(weights.mean()),
        "sparrow/sequence_is_max": float(weights.max()),
        "sparrow/sequence_is_min": float(weights.min()),
        "sparrow/vetoed_responses": float(vetoed.sum()),
        "sparrow/vetoed_fraction": float(vetoed.double().mean()),
    }
    return Correction(weights.float(), metrics)


CORRECTIONS: dict[str, Correct] = {"none": none, "tis": tis, "mask": mask, "sequence": sequence}


def correct(
    dense_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    lengths: Sequence[int],
    settings: AlgorithmConfig,
) -> Correction:
    """Weights of the correction that `settings` names, and mismatch metrics, in float64. Log-probs
    are [N], of responses of `lengths` [S]. Raises `ValueError` on log-probs that are not finite."""
    dense = dense_logprobs.detach().double()
    rollout = rollout_logprobs.detach().double()
    if not (torch.isfinite(dense).all() and torch.isfinite(rollout).all()):
        raise ValueError(
            "dense_logprobs or rollout_logprobs hold NaN or an infinity: expected finite log-probs"
        )
    correction = CORRECTIONS[settings.correction](dense - rollout, lengths, settings)
    mismatch = mismatch_metrics(dense, rollout, lengths)
    return Correction(correction.weights, mismatch | correction.metrics)


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
