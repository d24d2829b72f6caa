"""Quantities computed from logits in chunks of positions, so that not all logits exist at once."""

from typing import Any

import torch

from sparrow_sglang.mismatch.acceptance import acceptance_rate

CHUNK_ELEMENTS = 2**26
"""Logits that exist at a time: 256 MiB in fp32, and as much again for their gradient."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    entropies: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden [n, H] @ weight.T [H, V] / temperature) at `tokens` [n]: [n], fp32
    (float64 for float64), and `entropies` [n] in nats without gradient, empty unless requested. The
    product takes the dtype of `hidden` and is accumulated and kept in fp32. Chunks of at most
    `CHUNK_ELEMENTS` logits, recomputed in the backward pass; differentiable once, in `hidden` and
    `weight`. Entropies need no additional memory."""
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(
        hidden, weight, tokens, temperature, entropies
    )
    return result


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """hidden [n, H] @ weight.T [H, V] / temperature in fp32, differentiable in `hidden`."""
    result: torch.Tensor = _Logits.apply(hidden, weight, temperature)
    return result


def acceptance_between(
    sparse: torch.Tensor, dense: torch.Tensor, head: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Exact acceptance rates, fp32 [n], of two last hidden states [n, H] under `head` [V, H]."""
    projection = head.to(dense.dtype).t()
    rows = rows_at_once(head)
    parts = [
        acceptance_rate(product(left, projection), product(right, projection), temperature)
        for left, right in zip(sparse.split(rows), dense.split(rows), strict=True)
    ]
    return torch.cat(parts)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        weight = weight.detach().to(hidden.dtype)
        ctx.save_for_backward(weight)
        ctx.temperature = temperature
        return product(hidden, weight.t()).div_(temperature)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return (grads[0].to(weight.dtype) @ weight).div_(ctx.temperature), None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        with_entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        projection, rows = weight.to(hidden.dtype).t(), rows_at_once(weight)
        parts, normalisers, entropies = [], [], [hidden.new_empty(0)]
        chunks = zip(hidden.split(rows), tokens.split(rows), strict=True)
        for part, chosen in chunks:
            logits = product(part, projection).div_(temperature)
            normaliser = logits.logsumexp(1)
            parts.append(logits.gather(1, chosen[:, None]).squeeze(1) - normaliser)
            normalisers.append(normaliser)
            if with_entropies:
                logits.sub_(normaliser[:, None])
                # If an exp underflows to 0, so does its product with a log-prob of at least -1e38.
                entropies.append(-logits.exp().mul_(logits).sum(1))
        ctx.save_for_backward(hidden, weight, tokens, torch.cat(normalisers))
        ctx.temperature, ctx.rows = temperature, rows
        # The empty placeholder is left out, as it has the dtype of `hidden`.
        result = torch.cat(parts), torch.cat(entropies[1:] or entropies)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, tokens, normalisers = ctx.saved_tensors
        projection = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros(weight.shape, dtype=normalisers.dtype, device=weight.device)
            if ctx.needs_input_grad[1]
            else None
        )
        for start in range(0, len(hidden), ctx.rows):
            rows = slice(start, start + ctx.rows)
            logits = product(hidden[rows], projection.t()).div_(ctx.temperature)
            # The gradient of a log-prob in its logits: one-hot minus softmax.
            slope = logits.sub_(normalisers[rows, None]).exp_().neg_()
            slope.scatter_add_(1, tokens[rows, None], torch.ones_like(slope[:, :1]))
            slope.mul_(grads[0][rows, None] / ctx.temperature)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ projection
            if grad_weight is not None:
                grad_weight += product(slope.t(), hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def rows_at_once(head: torch.Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // head.shape[0])


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix product in fp32 or wider; that of 16-bit operands is not rounded to 16 bits."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
