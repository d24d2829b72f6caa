"""The sparse actor's law in the trainer: the server's own rule for every generated position.

In: queries and keys of whole sequences, a schedule. Out: attention that is dense for the prompt
and reads the budget's pages for the rest. Pages are selected exactly as
`sparrow_sglang.attention_backends.reference` defines it; the selection is treated as constant, so
gradients flow through the attention over the chosen pages only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sparrow_sglang.attention_backends.reference import page_landmarks, select_pages
from sparrow_sglang.schedule import BudgetSchedule

QUERY_ROWS = 512
"""Positions whose selection exists at a time; bounds the mask to that many rows."""


@dataclass(frozen=True)
class SparseRule:
    """Which positions decode sparsely: those after `prompt_lengths` [S], under `schedule`."""

    schedule: BudgetSchedule
    prompt_lengths: tuple[int, ...]


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompt_length: int,
    schedule: BudgetSchedule,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one sequence of T tokens as a server with `schedule` computes it.

    `query` is [1, Hq, T, D], `key` and `value` [1, Hkv, T, D], all after RoPE. Positions below
    `prompt_length` attend to everything before them; a later position t attends at sequence length
    t + 1 to the pages that the schedule's budget allows then. Returns [1, Hq, T, D].
    """
    length = query.shape[2]
    first_sparse = max(prompt_length, schedule.first_sparse_length() - 1)
    if first_sparse >= length:
        return causal_attention(query, key, value, scaling)
    landmarks = _landmarks(key[0].detach(), schedule.page_size)
    group = query.shape[1] // key.shape[1]
    q, k, v = (tensor[:, :, :first_sparse] for tensor in (query, key, value))
    parts = [causal_attention(q, k, v, scaling)]
    for start in range(first_sparse, length, QUERY_ROWS):
        end = min(start + QUERY_ROWS, length)
        rows = query[:, :, start:end]
        kept = _kept_tokens(rows[0].detach(), landmarks, start, schedule)
        parts.append(
            F.scaled_dot_product_attention(
                rows,
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=kept.repeat_interleave(group, 0)[None],
                scale=scaling,
                enable_gqa=group > 1,
            )
        )
    return torch.cat(parts, dim=2)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Full causal attention of one sequence; shapes as in `sparse_attention`."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _landmarks(key: torch.Tensor, page_size: int) -> torch.Tensor:
    """[Hkv, full pages, D] fp32, rounded to the dtype in which the server stores them."""
    heads, length, dim = key.shape
    full = length // page_size
    pages = key[:, : full * page_size].transpose(0, 1).reshape(full, page_size, heads, dim)
    return page_landmarks(pages).float().transpose(0, 1)


def _kept_tokens(
    query: torch.Tensor, landmarks: torch.Tensor, start: int, schedule: BudgetSchedule
) -> torch.Tensor:
    """Tokens that the positions from `start` on attend to: bool [Hkv, C, start + C].

    `query` is [Hq, C, D]. Each position is a request of its own length to `select_pages`.
    """
    heads, count = landmarks.shape[0], query.shape[1]
    device, page_size = query.device, schedule.page_size
    end = start + count
    group_query = query.float().unflatten(0, (heads, -1)).mean(dim=1)
    scores = group_query @ landmarks[:, : end // page_size].transpose(1, 2)
    # A page that is still partial at the end is the last one, and always kept.
    num_pages = schedule.num_pages(end)
    scores = F.pad(scores, (0, num_pages - scores.shape[-1])).transpose(0, 1)
    lengths = range(start + 1, end + 1)
    pages = torch.tensor([schedule.num_pages(n) for n in lengths], device=device)
    budget = torch.tensor([schedule.num_selected_pages(n) for n in lengths], device=device)
    chosen = select_pages(scores, pages, budget, schedule.sink_pages, schedule.recent_pages)
    unused = torch.arange(chosen.shape[-1], device=device) >= budget[:, None, None]
    # Unused entries go to a page past the last.
    kept = torch.zeros(count, heads, num_pages + 1, dtype=torch.bool, device=device)
    kept.scatter_(-1, chosen.masked_fill(unused, num_pages), True)
    token = torch.arange(end, device=device)
    causal = token <= torch.arange(start, end, device=device)[:, None]
    return kept.transpose(0, 1).repeat_interleave(page_size, dim=-1)[..., :end] & causal
