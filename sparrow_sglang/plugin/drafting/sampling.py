"""Exact sampling of several tokens a step, from drafts that are single tokens.

A draft x is accepted with the probability p(x) that the model gives it; otherwise the token is
drawn from p without x. So each token has the model's distribution, as in Leviathan et al., 2023,
with a proposal that is certain of x.
"""

from typing import Any

import torch


def accept_drafts(probs: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens until a draft is not what was sampled, and the one after the last draft.

    Args:
        probs: [B, n, V], the model's distribution at the last token and each draft.
        drafts: [B, n - 1], the draft after each of the first n - 1.

    Returns:
        tokens [B, n] int64, and how many of them count, [B] int64, 1 to n.
    """
    proposed = probs[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)
    accepted = torch.rand_like(proposed) < proposed
    correct = accepted.long().cumprod(-1).sum(-1)
    row = torch.arange(len(probs), device=probs.device)
    rest = probs[row, correct]
    refused = torch.nn.functional.pad(drafts, (0, 1))[row, correct]
    is_refused = (correct < drafts.shape[1])[:, None]
    without = rest.scatter(-1, refused[:, None], 0.0)
    # A draft can be refused at a probability that rounds to 1, with nothing left beside it.
    possible = is_refused & (without.sum(-1, keepdim=True) > 0)
    rest = torch.where(possible, without, rest)
    # The largest of p / Exp(1) is a sample of p, without waiting for the device.
    sampled = (rest / torch.empty_like(rest).exponential_()).argmax(-1)
    tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, correct[:, None], sampled[:, None])
    return tokens, correct + 1


def distribution(logits: torch.Tensor, sampling: Any, rows: int) -> torch.Tensor:
    """What SGLang samples from in plain decode, under temperature, top-k and top-p.

    Args:
        logits: [B * rows, V] in fp32; biases of requests are added in place, as SGLang does.
        sampling: SGLang's SamplingBatchInfo of the B requests.

    Returns:
        [B, rows, V] fp32, not normalised where something is left out.
    """

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(rows, 0)

    if sampling.logit_bias is not None:
        logits += of_rows(sampling.logit_bias)
    if sampling.is_all_greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0).unflatten(0, (-1, rows))
    probs = (logits / of_rows(sampling.temperatures)).softmax(-1)
    if sampling.need_top_k_sampling or sampling.need_top_p_sampling:
        ordered, ids = probs.sort(-1, descending=True)
        rank = torch.arange(probs.shape[-1], device=probs.device)
        left_out = rank >= of_rows(sampling.top_ks)[:, None]
        left_out |= ordered.cumsum(-1) - ordered > of_rows(sampling.top_ps)[:, None]
        kept = ordered.masked_fill(left_out, 0.0)
        # A draft is accepted with its share of what is kept.
        probs = torch.zeros_like(probs).scatter_(-1, ids, kept / kept.sum(-1, keepdim=True))
    return probs.unflatten(0, (-1, rows))
