"""The sparse actor's distribution in the trainer: the server's rule for every generated position.
Pages are selected as `sparrow_sglang.attention_backends.reference` defines it; the selection is
constant, so gradients flow through the attention over the chosen pages only."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparrow_sglang.attention_backends.reference import (
    best_product,
    group_queries,
    kept_pages,
    page_landmarks,
)
from sparrow_sglang.rl.policy.selected_attention import BLOCK, attend_by_blocks, block_mask
from sparrow_sglang.schedules.schedule import INT4, BudgetSchedule


@dataclass(frozen=True, eq=False)
class Padding:
    """Spans of a pack as rows as wide as the longest. `source` [rows, width] are the tokens'
    indices in the pack; a span's last token is repeated as padding. `target` [n] are the spans'
    tokens in the flattened rows."""

    source: torch.Tensor
    target: torch.Tensor

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, heads, width, D] of [1, heads, T, D]."""
        rows = packed[0].index_select(1, self.source.flatten())
        return rows.unflatten(1, self.source.shape).transpose(0, 1)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[1, heads, n, D] of [rows, heads, width, D], the spans one after the other."""
        return padded.transpose(0, 1).flatten(1, 2).index_select(1, self.target)[None]


# Cached, as every layer needs the same padding, in the forward and the backward pass.
@lru_cache(maxsize=64)
def padding(spans: tuple[tuple[int, int], ...], device: torch.device) -> Padding:
    lengths = [end - first for first, end in spans]
    width = max(lengths)
    column = np.arange(width)
    source = np.stack([np.minimum(first + column, end - 1) for first, end in spans])
    target = np.concatenate([row * width + np.arange(n) for row, n in enumerate(lengths)])
    return Padding(torch.as_tensor(source, device=device), torch.as_tensor(target, device=device))


def like_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Runs [first, last) of neighbours none of which is more than twice as long as another, so that
    padding makes attention at most four times as costly."""
    runs: list[tuple[int, int]] = []
    first, shortest, longest = 0, 0, 0
    for index, length in enumerate(lengths):
        shortest, longest = min(shortest or length, length), max(longest, length)
        if longest > 2 * shortest:
            runs.append((first, index))
            first, shortest, longest = index, length, length
    return [*runs, (first, len(lengths))]


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    scaling: float | None,
) -> torch.Tensor:
    """Attention of each span (first, end) to itself, padded to the longest. `query` is [1, Hq, T,
    D], `key` and `value` [1, Hkv, T, D]; returns [1, Hq, n, D], the spans one after the other."""
    if len(spans) == 1:
        ((first, end),) = spans
        query, key, value = (tensor[:, :, first:end] for tensor in (query, key, value))
    else:
        # The padding follows a span's tokens, so causal attention hides it from them.
        rows = padding(tuple(spans), query.device)
        query, key, value = (rows.pad(tensor) for tensor in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
    )
    return out if len(spans) == 1 else rows.unpad(out)


ATTENTION = "sparrow_packed"

SCORES_AT_ONCE = 1 << 23
"""Pages are ranked in chunks of about this many products of query and landmark, to bound memory."""

MASK_ROWS = 512
"""Rows (positions) of one mask when attention is computed in plain torch."""

# Not cuDNN, which torch 2.11 takes by default on an H100 or H200: with a mask of some widths its
# backward pass gives NaN (github.com/pytorch/pytorch/issues/196678).
_TRUSTED_WITH_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class SparseRule:
    """Which positions decode sparsely: those after `prompt_lengths` [S], under `schedule`."""

    schedule: BudgetSchedule
    prompt_lengths: tuple[int, ...]
    _read: dict[torch.device, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _chosen: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def pages_read(self, cached: int, device: torch.device) -> torch.Tensor:
        """Pages that a sparse layer reads, int64, by the number of pages cached, 0 to at least
        `cached`. Computed once for all layers: it is slow at 32K positions."""
        read = self._read.get(device)
        if read is None or len(read) <= cached:
            counts = self.schedule.pages_read(np.arange(cached + 1))
            read = self._read[device] = torch.from_numpy(counts).to(device)
        return read

    def selected_pages(
        self, query: torch.Tensor, key: torch.Tensor, late: tuple[tuple[int, int], ...]
    ) -> Iterator[torch.Tensor]:
        """Pages that the positions `late` (start, end) of each of S sequences attend to. `query` is
        [S, Hq, R, D], `key` [S, Hkv, T, D], padded as by `padding`. Yields bool chunks [S, Hkv,
        rows, pages up to the last of these rows] of a multiple of `BLOCK` rows except for the
        last."""
        schedule = self.schedule
        count, heads, length, _ = key.shape
        int4 = schedule.selection == INT4
        landmarks = stored_landmarks(key, schedule.page_size, int4)
        positions = padding(late, query.device).source
        read = self.pages_read(schedule.num_pages(length), query.device)
        products_of_row = count * heads * schedule.num_pages(length) * landmarks.shape[3]
        if int4:
            products_of_row *= query.shape[1] // heads
        rows = _rows_at_once(products_of_row)
        for first in range(0, query.shape[2], rows):
            last = min(first + rows, query.shape[2])
            end = min(max(start for start, _ in late) + last, length)
            scored = landmarks[:, :, : end // schedule.page_size]
            scores = page_scores(query[:, :, first:last], scored, int4)
            # A partial page has no score; it is the last page, which is always kept.
            scores = F.pad(scores, (0, schedule.num_pages(end) - scores.shape[-1]))
            pages = (positions[:, first:last] // schedule.page_size + 1).flatten()
            kept = kept_pages(
                scores.transpose(1, 2).flatten(0, 1),
                pages,
                read[pages],
                int(schedule.pages_read(scores.shape[-1])),
                schedule.sink_pages,
                schedule.recent_pages,
            )
            yield kept.unflatten(0, (len(scores), -1)).transpose(1, 2)

    def once(self, key: Hashable, choose: Callable[[], Any]) -> Any:
        """The result of `choose` for two calls: gradient checkpointing repeats the forward pass."""
        if key in self._chosen:
            return self._chosen.pop(key)
        chosen = self._chosen[key] = choose()
        return chosen


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    prompt_lengths: Sequence[int],
    rule: SparseRule,
    layer: int,
    scaling: float | None,
    runs_twice: bool = False,
) -> torch.Tensor:
    """Attention of the `spans` (first, end) of a pack, as the server computes it. `query` is [1,
    Hq, T, D], `key` and `value` [1, Hkv, T, D], after RoPE. Prompt positions attend to everything
    before them; a later position t to the pages that the budget allows at length t + 1.
    Returns [1, Hq, n, D], the spans concatenated. Under autocast, inputs and landmarks are rounded
    first, as on the server. The selection of a pass that `runs_twice` is computed once."""
    device = query.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    schedule = rule.schedule
    always_dense = schedule.first_sparse_length() - 1
    lengths = [end - first for first, end in spans]
    if max(lengths) <= always_dense:
        return causal_attention(query, key, value, spans, scaling)
    # Every span gets at least its last position as a late one. If that is within the budget, it
    # attends to everything under the rule too.
    late = tuple(
        (min(max(prompt, always_dense), length - 1), length)
        for prompt, length in zip(prompt_lengths, lengths, strict=True)
    )
    cuts = [first + start for (first, _), (start, _) in zip(spans, late, strict=True)]
    early = [(first, cut) for (first, _), cut in zip(spans, cuts, strict=True)]
    dense = causal_attention(query, key, value, early, scaling)
    whole = padding(tuple(spans), device)
    rest = padding(tuple((cut, end) for cut, (_, end) in zip(cuts, spans, strict=True)), device)
    rows, keys = rest.pad(query), whole.pad(key)
    values = whole.pad(value)
    positions, page_size = padding(late, device).source, schedule.page_size
    by_rows = _by_rows(rows)

    def choose() -> Any:
        selection = rule.selected_pages(rows.detach(), keys.detach(), late)
        if by_rows:
            return list(selection)
        group = rows.shape[1] // keys.shape[1]
        return block_mask(selection, positions, keys.shape[2], page_size, group)

    # Scores are fp32 products, which autocast would round.
    with torch.autocast(device.type, enabled=False):
        chosen = rule.once((layer, spans[0]), choose) if runs_twice else choose()
        if by_rows:
            out = attend_by_rows(rows, keys, values, chosen, positions, page_size, scaling)
        else:
            out = attend_by_blocks(rows, keys, values, chosen, scaling)
    parts = torch.cat([dense, rest.unpad(out)], dim=2)
    return parts.index_select(2, _in_order(late, device))


def attend_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selection: Iterable[torch.Tensor],
    positions: torch.Tensor,
    page_size: int,
    scaling: float | None,
) -> torch.Tensor:
    """`attend_by_blocks` in plain torch; keeps a mask of [S, Hq, R, T] for the backward pass."""
    group = query.shape[1] // key.shape[1]
    parts, first = [], 0
    # A single mask for all positions would also cover the tokens after each, half of them all.
    for kept in (rows for chunk in selection for rows in chunk.split(MASK_ROWS, 2)):
        last = first + kept.shape[2]
        end = min(kept.shape[3] * page_size, key.shape[2])
        token = torch.arange(end, device=query.device)
        causal = token <= positions[:, None, first:last, None]
        mask = kept.repeat_interleave(page_size, -1)[..., :end] & causal
        with sdpa_kernel(_TRUSTED_WITH_MASKS):
            parts.append(
                F.scaled_dot_product_attention(
                    query[:, :, first:last],
                    key[:, :, :end],
                    value[:, :, :end],
                    attn_mask=mask.repeat_interleave(group, 1),
                    scale=scaling,
                    enable_gqa=group > 1,
                )
            )
        first = last
    return torch.cat(parts, dim=2)


def page_scores(query: torch.Tensor, landmarks: torch.Tensor, int4: bool) -> torch.Tensor:
    """`reference.score_pages` of full pages: fp32 [S, Hkv, R, pages], with gradient, of `query` [S,
    Hq, R, D] and `landmarks` [S, Hkv, pages, M, D]."""
    queries = group_queries(query.transpose(1, 2), landmarks.shape[1], int4)
    queries = queries.permute(0, 2, 3, 1, 4)
    products = queries @ landmarks.flatten(2, 3).transpose(2, 3)[:, :, None]
    products = products.unflatten(-1, (-1, landmarks.shape[3]))
    return best_product(products.permute(0, 1, 3, 4, 2, 5))


def _by_rows(query: torch.Tensor) -> bool:
    # With so few rows a mask is small, and FlexAttention would compile an extra kernel for them.
    return query.device.type == "cpu" or query.shape[2] <= BLOCK


def _rows_at_once(products_of_row: int) -> int:
    return max(1, SCORES_AT_ONCE // (products_of_row * BLOCK)) * BLOCK


def stored_landmarks(key: torch.Tensor, page_size: int, int4: bool) -> torch.Tensor:
    """Landmarks [S, Hkv, full pages, M, D] fp32 of keys [S, Hkv, T, D], rounded to what the server
    stores."""
    count, heads, length, dim = key.shape
    full = length // page_size
    pages = key[:, :, : full * page_size].transpose(1, 2)
    values = page_landmarks(pages.reshape(-1, page_size, heads, dim), int4).values()
    return values.unflatten(0, (count, full)).transpose(1, 2)


# Cached, as `padding` is, since every layer needs the same indices.
@lru_cache(maxsize=64)
def _in_order(late: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Indices [n] that put tokens in sequence order, where all early ones precede all late ones."""
    dense, rest = 0, sum(start for start, _ in late)
    parts = []
    for start, end in late:
        parts += [np.arange(dense, dense + start), np.arange(rest, rest + end - start)]
        dense, rest = dense + start, rest + end - start
    return torch.as_tensor(np.concatenate(parts), device=device)


def _attend_within_sequences(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    sequence_lengths: Sequence[int],
    sparse_rule: SparseRule | None = None,
    runs_twice: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    inputs, layer = (query, key, value), cast(int, module.layer_idx)
    spans = list(pairwise(accumulate(sequence_lengths, initial=0)))
    runs = like_lengths(sequence_lengths)
    if sparse_rule is None or layer in sparse_rule.schedule.dense_layers:
        parts = [causal_attention(*inputs, spans[slice(*run)], scaling) for run in runs]
    else:
        if query.device.type == "cpu":
            # On a CPU sequences run one by one, as padding them to one length would only add work.
            runs = [(index, index + 1) for index in range(len(spans))]
        parts = [
            sparse_attention(
                *inputs,
                spans[slice(*run)],
                sparse_rule.prompt_lengths[slice(*run)],
                sparse_rule,
                layer,
                scaling,
                runs_twice,
            )
            for run in runs
        ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend_within_sequences)
