"""How far the sparse actor's next-token distribution is from the dense policy's. Imports torch only
where a function needs it, SGLang never."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import torch

_ROWS = 1024


@dataclass(frozen=True)
class SampledMean:
    """Estimate of the *mean* acceptance rate from sampled tokens; holds no tail percentile."""

    mean: float
    standard_error: float
    tokens: int


def acceptance_rate(
    sparse_logits: "torch.Tensor",
    dense_logits: "torch.Tensor",
    temperature: float = 1.0,
    vocab_chunk: int = 16384,
) -> "torch.Tensor":
    """Exact acceptance rate per position, sum over v of min(p_sparse(v), p_dense(v)).

    Both logits are [T, V] on one device, of any floating dtype; the result is fp32 [T] in [0, 1].
    Computes in fp32 over blocks of at most 1,024 positions by `vocab_chunk` tokens, so that no
    further [T, V] tensor is allocated. Logits of -inf count as probability 0. No gradient.
    Raises `ValueError` on shapes that differ, a temperature of 0 or below, and logits with NaN.
    """
    import torch

    if sparse_logits.ndim != 2 or sparse_logits.shape != dense_logits.shape:
        shapes = tuple(sparse_logits.shape), tuple(dense_logits.shape)
        raise ValueError(f"sparse_logits, dense_logits {shapes}: expected [T, V] for both")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number above 0")
    tokens, vocab = sparse_logits.shape
    alpha = torch.empty(tokens, dtype=torch.float32, device=sparse_logits.device)
    with torch.no_grad():
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            sparse, dense = sparse_logits[rows], dense_logits[rows]
            chunks = [slice(i, i + vocab_chunk) for i in range(0, vocab, vocab_chunk)]
            sparse_top = sparse.amax(1, keepdim=True).float()
            dense_top = dense.amax(1, keepdim=True).float()
            sparse_norm = _log_normaliser(sparse, sparse_top, chunks, temperature)
            dense_norm = _log_normaliser(dense, dense_top, chunks, temperature)
            overlap = torch.zeros_like(sparse_norm)
            for chunk in chunks:
                log_sparse = (sparse[:, chunk].float() - sparse_top) / temperature - sparse_norm
                log_dense = (dense[:, chunk].float() - dense_top) / temperature - dense_norm
                overlap += torch.minimum(log_sparse, log_dense).exp().sum(1, keepdim=True)
            alpha[rows] = overlap.squeeze(1)
    if torch.isnan(alpha).any():
        raise ValueError("logits: expected finite numbers or -inf, and a finite one per position")
    # The two normalisers round, so that equal distributions would reach 1 + 1e-7.
    return alpha.clamp_(max=1.0)


def mean_acceptance_from_samples(
    sparse_logprobs: ArrayLike, dense_logprobs: ArrayLike
) -> SampledMean:
    """Unbiased estimate of the mean acceptance rate: mean of min(1, p_dense / p_sparse). Log-probs
    [T] of the sampled tokens on both sides; the tokens must have been drawn from p_sparse itself,
    without top-p or top-k truncation. One token's ratio is not its acceptance rate, and the ratios'
    5th percentile is not the tail percentile (it lies far below), so none is returned. The standard
    error treats tokens as independent. Raises `ValueError` on NaN."""
    sparse = np.asarray(sparse_logprobs, dtype=np.float64)
    dense = np.asarray(dense_logprobs, dtype=np.float64)
    assert sparse.ndim == 1 and sparse.shape == dense.shape and sparse.size, "[T] for both"
    if not np.isfinite(sparse).all() or np.isnan(dense).any():
        raise ValueError("sparse_logprobs, dense_logprobs: expected finite ones, or -inf if dense")
    ratio = np.exp(np.minimum(dense - sparse, 0.0))
    spread = float(ratio.std(ddof=1)) if ratio.size > 1 else float("inf")
    return SampledMean(float(ratio.mean()), spread / ratio.size**0.5, ratio.size)


def _log_normaliser(
    logits: "torch.Tensor", top: "torch.Tensor", chunks: list[slice], temperature: float
) -> "torch.Tensor":
    """log sum exp((logits - top) / temperature) per row, [T, 1] fp32."""
    import torch

    total = torch.zeros_like(top)
    for chunk in chunks:
        scaled = (logits[:, chunk].float() - top) / temperature
        total += scaled.exp().sum(1, keepdim=True)
    return total.log()
