"""Metrics of a training step's rollouts, and exact acceptance rates of some of them.
`rollout_corr/*` are verl's names and definitions, computed in float64; `sparrow/*` are quantities
that verl does not have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparrow_sglang.mismatch.acceptance import mean_acceptance_from_samples
from sparrow_sglang.mismatch.tail import NOT_COUNTED, TAIL_PERCENTILE, token_bins
from sparrow_sglang.rl.types import Group, Rewards, Rollout, known_rewards
from sparrow_sglang.schedules.schedule import BudgetSchedule

LOG_RATIO_BOUND = 20.0
"""As in verl, log ratios of importance weights are cut to +-20 before they are exponentiated;
`k3_kl` and perplexities take them uncut."""


def sequence_sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    counts = torch.as_tensor(lengths, device=values.device)
    return torch.segment_reduce(values, "sum", lengths=counts)


def mismatch_metrics(
    dense: torch.Tensor, rollout: torch.Tensor, lengths: Sequence[int]
) -> dict[str, float]:
    """Distance of the sparse actor from the dense policy, from sampled tokens; log-probs are
    float64 [N]. `kl` and `k3_kl` estimate KL(rollout || dense) per token; `log_ppl_diff` is a
    response's mean of log p_rollout - log p_dense, averaged; `chi2_token` is the mean squared ratio
    - 1, `chi2_seq` that of whole responses. `sparrow/ratio_p05` is the 5th percentile of min(1,
    p_dense / p_rollout), far below the tail percentile of the acceptance rate. `sparrow/ess_token`
    and `sparrow/ess_response` are effective sample sizes of the untruncated ratios of tokens and of
    responses."""
    counts = torch.as_tensor(lengths, device=dense.device)
    log_ratio = dense - rollout
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    dense_mean = sequence_sums(dense, lengths) / counts
    rollout_mean = sequence_sums(rollout, lengths) / counts
    difference = rollout_mean - dense_mean
    products = sequence_sums(log_ratio, lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    probs = (dense.exp() - rollout.exp()).abs()
    corr = {
        "kl": -log_ratio.mean(),
        "k3_kl": (log_ratio.exp() - log_ratio - 1).mean(),
        "training_ppl": (-dense_mean).exp().mean(),
        "training_log_ppl": -dense_mean.mean(),
        "rollout_ppl": (-rollout_mean).exp().mean(),
        "rollout_log_ppl": -rollout_mean.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": ratio.square().mean() - 1,
        "chi2_seq": (2 * products).exp().mean() - 1,
    }
    sampled = mean_acceptance_from_samples(rollout.cpu().numpy(), dense.cpu().numpy())
    accepted = ratio.clamp(max=1.0).cpu().numpy()
    return {f"rollout_corr/{name}": float(value) for name, value in corr.items()} | {
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
        "sparrow/accept_mean_estimate": sampled.mean,
        "sparrow/ratio_p05": tail_percentile(accepted),
        "sparrow/ess_token": effective_sample_share(log_ratio),
        "sparrow/ess_response": effective_sample_share(sequence_sums(log_ratio, lengths)),
    }


def entropy_metrics(rollout: torch.Tensor, entropies: torch.Tensor) -> dict[str, float]:
    """Mean of `entropies` [N] in nats, and how much the sparse actor's mean entropy is above it,
    which the mean of -log p_rollout [N] estimates without bias. Below 0, rollouts are sharper than
    the policy, which then meets fewer of its own mistakes."""
    policy = float(entropies.double().mean())
    gap = -float(rollout.double().mean()) - policy
    return {"actor/entropy": policy, "sparrow/entropy_gap": gap}


def effective_sample_share(log_ratio: torch.Tensor) -> float:
    """Kish's effective sample size of weights exp(log_ratio) [N] as a share of N: (sum w)^2 / (N
    sum w^2). From logarithms, so that no weight overflows."""
    first, second = log_ratio.logsumexp(0), (2 * log_ratio).logsumexp(0)
    return float((2 * first - second).exp()) / len(log_ratio)


def importance_metrics(
    weights: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> dict[str, float]:
    """verl's metrics of the weights [N] that corrected the ratios [N] of tokens, as of verl 0.9.1.
    Weights are in [0, high], which hides large ratios; `sparrow/ess_*` show them."""
    weights, mean = weights.double(), weights.double().mean()
    values = {
        "mean": mean,
        "max": weights.max(),
        "min": weights.min(),
        "std": (weights.square().mean() - mean.square()).clamp(min=0).sqrt(),
        # The small number is verl's, as weights may all be 0.
        "eff_sample_size": 1 / (weights / (mean + 1e-8)).square().mean(),
        "ratio_fraction_high": (ratio > high).double().mean(),
        "ratio_fraction_low": (ratio < low).double().mean(),
    }
    return {f"rollout_corr/rollout_is_{name}": float(value) for name, value in values.items()}


def rollout_metrics(groups: Sequence[Group], rewards: Sequence[Rewards]) -> dict[str, float]:
    """Rewards and response lengths, under verl's names; missing rewards count nowhere. A mixture of
    tasks also has `sparrow/task/NAME/score`. `response_length/clip_ratio` and
    `sparrow/retracted_fraction` are shares of responses truncated and retracted."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    known = [known_rewards(group) for group in rewards]
    scores = np.concatenate(known)
    lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
    cut = np.array([rollout.truncated for rollout in rollouts])
    prompts = np.array([len(group.prompt.input_ids) for group in groups])
    by_task: dict[str, list[float]] = {}
    for values, group in zip(known, groups, strict=True):
        if values.size:
            by_task.setdefault(group.prompt.task, []).append(float(values.mean()))
    scores_of_tasks = {f"sparrow/task/{t}/score": float(np.mean(s)) for t, s in by_task.items()}
    return (scores_of_tasks if len(by_task) > 1 else {}) | {
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(cut.mean()),
        "sparrow/retracted_fraction": float(np.mean([rollout.retracted for rollout in rollouts])),
    }


def kv_metrics(rollouts: Sequence[Rollout], schedule: BudgetSchedule | None) -> dict[str, float]:
    """Mean KV read by a sparse layer for a generated token, by pages, and mean KV cached, both in
    tokens and over decode steps: a response's first token comes out of prefill."""
    lengths = np.concatenate(
        [len(one.prompt_ids) + np.arange(1, len(one.response_ids)) for one in rollouts]
    )
    if not lengths.size:
        return {}
    read = lengths if schedule is None else schedule.tokens_read(lengths)
    return {
        "sparrow/kv_tokens_read": float(read.mean()),
        "sparrow/kv_tokens_cached": float(lengths.mean()),
    }


def round_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean tokens of a lossless round, without a response's first token; empty without rounds."""
    decoded = [one for one in rollouts if one.rounds]
    tokens = sum(len(one.response_ids) - 1 for one in decoded)
    rounds = sum(one.rounds for one in decoded)
    return {"sparrow/tokens_per_round": tokens / rounds} if rounds else {}


MIN_PROMPTS = 8
"""Prompts below which measured tails do not change how much of an adapter rollouts use."""


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Rates [N] float64 of the sampled tokens of `rollouts`, concatenated, under one schedule.
    `bins` [N] int64 are those of `token_bins`; `owners` [N] int64 index `rollouts`."""

    rollouts: tuple[Rollout, ...]
    rates: NDArray[np.float64]
    bins: NDArray[np.int64]
    owners: NDArray[np.int64]

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], rates: NDArray[np.float64], schedule: BudgetSchedule
    ) -> "Acceptance":
        """`rates` [N] are those of `rollouts` under `schedule`, in order."""
        bins = [
            token_bins(schedule, len(one.prompt_ids), len(one.response_ids)) for one in rollouts
        ]
        owners = np.repeat(np.arange(len(rollouts)), [len(one.logprobs) for one in rollouts])
        return cls(tuple(rollouts), rates, np.concatenate([np.empty(0, np.int64), *bins]), owners)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which tokens [N] were decoded sparsely."""
        return self.bins != NOT_COUNTED

    def tails(self) -> dict[tuple[str, tuple[int, ...]], float]:
        """Tail percentile of each response with sparse tokens, by prompt id and token ids: a step
        with more prompts than the data samples some twice."""
        return {
            (rollout.prompt_id, rollout.response_ids): tail_percentile(rates)
            for index, rollout in enumerate(self.rollouts)
            if (rates := self.rates[self.counted & (self.owners == index)]).size
        }


def acceptance_metrics(rates: NDArray[np.float64], bins: NDArray[np.int64]) -> dict[str, float]:
    """Tail percentile and mean of exact acceptance `rates` [N], in all and per bin of
    `token_bins`. Empty if no token was decoded sparsely."""
    counted = bins != NOT_COUNTED
    rates, bins = rates[counted], bins[counted]
    if not rates.size:
        return {}
    return {
        "sparrow/accept_p05": tail_percentile(rates),
        "sparrow/accept_mean": float(rates.mean()),
    } | {
        f"sparrow/accept_p05_bin{index}": tail_percentile(rates[bins == index])
        for index in np.unique(bins)
    }


def tail_percentile(values: NDArray[np.float64]) -> float:
    """The 5th percentile of `values` [N], as the ceil(N / 20)-th smallest."""
    return float(np.percentile(values, TAIL_PERCENTILE, method="inverted_cdf"))
