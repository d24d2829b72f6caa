"""The sparse actor's law in the trainer: the server's own rule for every generated position.

In: queries and keys of whole sequences, a schedule. Out: attention that is dense for the prompt
and reads the budget's pages for the rest. Pages are selected exactly as
`sparrow_sglang.attention_backends.reference` defines it; the selection is treated as constant, so
gradients flow through the attention over the chosen pages only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sparrow_sglang.attention_backends.reference import kept_pages, page_landmarks
from sparrow_sglang.rl.selected_attention import BLOCK, attend_by_blocks
from sparrow_sglang.schedule import BudgetSchedule

SCORES_AT_ONCE = 1 << 23
"""Pages are ranked for about so many pairs of position and page at a time, to bound the memory."""

MASK_ROWS = 512
"""Positions that share one mask where attention is computed in plain torch."""


@dataclass(frozen=True)
class SparseRule:
    """Which positions decode sparsely: those after `prompt_lengths` [S], under `schedule`."""

    schedule: BudgetSchedule
    prompt_lengths: tuple[int, ...]
    _read: dict[torch.device, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def pages_read(self, held: int, device: torch.device) -> torch.Tensor:
        """Pages that a sparse layer reads of 0, 1, ... `held` pages or more: int64, by that count.

        The schedule is asked once for all layers, as 32K positions are too many for each.
        """
        known = self._read.get(device)
        if known is None or len(known) <= held:
            size = self.schedule.page_size
            counts = [self.schedule.num_selected_pages(n * size) for n in range(held + 1)]
            known = self._read[device] = torch.tensor(counts, device=device)
        return known


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: SparseRule,
    sequence: int,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one sequence of T tokens, number `sequence` of `rule`, as its server has it.

    `query` is [1, Hq, T, D], `key` and `value` [1, Hkv, T, D], all after RoPE. Positions of the
    prompt attend to everything before them; a later position t attends at sequence length t + 1 to
    the pages that the schedule's budget allows then. Returns [1, Hq, T, D]. Under autocast all is
    rounded first, landmarks included, as the server's are.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    schedule, length = rule.schedule, query.shape[2]
    start = max(rule.prompt_lengths[sequence], schedule.first_sparse_length() - 1)
    if start >= length:
        return causal_attention(query, key, value, scaling)
    dense = causal_attention(query[:, :, :start], key[:, :, :start], value[:, :, :start], scaling)
    rows = query[:, :, start:]
    # Of so few rows a mask is small, and a kernel for a single block would be compiled besides.
    by_rows = device == "cpu" or rows.shape[2] <= BLOCK
    attend = attend_by_rows if by_rows else attend_by_blocks
    # Scores are fp32 products, which autocast would round.
    with torch.autocast(device, enabled=False):
        selection = _selection(rows[0].detach(), key[0].detach(), start, rule)
        sparse = attend(rows, key, value, selection, start, schedule.page_size, scaling)
    return torch.cat([dense, sparse], dim=2)


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


def attend_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selection: Iterator[torch.Tensor],
    start: int,
    page_size: int,
    scaling: float | None,
) -> torch.Tensor:
    """`attend_by_blocks` in plain torch; keeps a mask of [Hq, R, T] for the backward pass."""
    group = query.shape[1] // key.shape[1]
    parts, first = [], start
    # One mask for all positions would cover the half of the tokens that are after them.
    for kept in (rows for chunk in selection for rows in chunk.split(MASK_ROWS, 1)):
        end = first + kept.shape[1]
        token = torch.arange(end, device=query.device)
        causal = token <= token[first:, None]
        mask = kept.repeat_interleave(page_size, -1)[..., :end] & causal
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first - start : end - start],
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=mask.repeat_interleave(group, 0)[None],
                scale=scaling,
                enable_gqa=group > 1,
            )
        )
        first = end
    return torch.cat(parts, dim=2)


def _selection(
    query: torch.Tensor, key: torch.Tensor, start: int, rule: SparseRule
) -> Iterator[torch.Tensor]:
    """Pages that the positions from `start` on attend to, some positions at a time.

    `query` is [Hq, R, D], `key` [Hkv, T, D]. Gives bool [Hkv, rows, pages until the last row], the
    rows in whole blocks of `attend_by_blocks` but for the last; each position is a request of its
    own length to `kept_pages`.
    """
    schedule, device = rule.schedule, query.device
    heads, length, _ = key.shape
    landmarks = _landmarks(key, schedule.page_size)
    read = rule.pages_read(schedule.num_pages(length), device)
    rows = _rows_at_once(heads * schedule.num_pages(length))
    for first in range(start, length, rows):
        end = min(first + rows, length)
        group_query = query[:, first - start : end - start].float().unflatten(0, (heads, -1))
        scores = group_query.mean(1) @ landmarks[:, : end // schedule.page_size].transpose(1, 2)
        # A page that is still partial at the end is the last one, and always kept.
        held = schedule.num_pages(end)
        scores = F.pad(scores, (0, held - scores.shape[-1])).transpose(0, 1)
        pages = torch.arange(first, end, device=device) // schedule.page_size + 1
        kept = kept_pages(scores, pages, read[pages], schedule.sink_pages, schedule.recent_pages)
        yield kept.transpose(0, 1)


def _rows_at_once(scores_of_row: int) -> int:
    return max(1, SCORES_AT_ONCE // (scores_of_row * BLOCK)) * BLOCK


def _landmarks(key: torch.Tensor, page_size: int) -> torch.Tensor:
    """[Hkv, full pages, D] fp32, rounded to the dtype in which the server stores them."""
    heads, length, dim = key.shape
    full = length // page_size
    pages = key[:, : full * page_size].transpose(0, 1).reshape(full, page_size, heads, dim)
    return page_landmarks(pages).float().transpose(0, 1)
