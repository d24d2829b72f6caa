"""Learned page selection: matrices that transform the queries that score pages.

In: queries and keys of a layer, by which the trainer's sparse policy selects pages. Out: scores of
the transformed queries, the divergence of these scores from the attention that pages really get,
and rules that select by scores or by attention. Attention itself is computed with the original
queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sparrow_sglang.rl.policy.packed_attention import padding
from sparrow_sglang.rl.policy.selected_attention import BLOCK
from sparrow_sglang.rl.policy.sparse_policy import (
    SparseRule,
    best_pages,
    page_scores,
    stored_landmarks,
)
from sparrow_sglang.schedule import BudgetSchedule

Late = tuple[tuple[int, int], ...]
"""First and last position, exclusive, of each sequence that decodes sparsely."""

ROWS = 4 * BLOCK
"""Positions whose attention is computed at a time."""


class QueryMatrices:
    """A matrix [D, D] for each layer and KV head, or for each layer and query head.

    `values` are fp32 [layers, heads, D, D], identities at first; row vectors are multiplied from
    the left.
    """

    def __init__(self, layers: int, heads: int, dim: int, device: torch.device) -> None:
        self.values = torch.eye(dim, device=device).repeat(layers, heads, 1, 1).requires_grad_()

    def applied(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """`query` [S, Hq, R, D] times its heads' matrices, to score pages: fp32, same shape.

        Query heads that share a KV head are adjacent, and share its matrix.
        """
        matrices = self.values[layer]
        heads = query.float().unflatten(1, (len(matrices), -1))
        return (heads @ matrices[:, None]).flatten(1, 2)


def attention_by_page(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The share of dense attention that each page gets: fp32 [S, Hkv, R, pages].

    `query` [S, Hq, R, D] stands at `positions` [S, R], `key` is [S, Hkv, T, D]; logits are scaled
    by 1/sqrt(D). Shares are means over the query heads of a KV head; they sum to 1 over the pages.
    """
    heads, length, dim = key.shape[1:]
    groups = query.float().unflatten(1, (heads, -1))
    logits = groups @ key.float().transpose(2, 3)[:, :, None] * dim**-0.5
    later = torch.arange(length, device=key.device) > positions[:, None, None, :, None]
    weights = logits.masked_fill(later, -torch.inf).softmax(-1).mean(2)
    return F.pad(weights, (0, -length % page_size)).unflatten(-1, (-1, page_size)).sum(-1)


def ranked_pages(positions: torch.Tensor, pages: int, schedule: BudgetSchedule) -> torch.Tensor:
    """Which of the `pages` compete at `positions` [S, R]: bool [S, 1, R, pages].

    Sinks and recent pages do not compete, as they are always kept, nor do pages after a position.
    """
    page = torch.arange(pages, device=positions.device)
    last = positions // schedule.page_size + 1 - schedule.recent_pages
    return ((page >= schedule.sink_pages) & (page < last[..., None]))[:, None]


def score_divergence(
    schedule: BudgetSchedule,
    matrices: QueryMatrices,
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    attention: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """KL(attention || softmax of page scores) over the competing pages, times their share.

    The result is a scalar with a gradient in `matrices`, the mean over KV heads and positions.
    `attention` comes from `attention_by_page`; pages are scored as under the selection rule of
    `schedule`.
    """
    landmarks, pairs = stored_landmarks(key, schedule, layer)
    scores = page_scores(matrices.applied(query, layer), landmarks, schedule.selection, pairs)
    scores = F.pad(scores, (0, attention.shape[-1] - scores.shape[-1])) * key.shape[3] ** -0.5
    ranked = ranked_pages(positions, attention.shape[-1], schedule)
    least = torch.finfo(scores.dtype).min
    log_scores = scores.masked_fill(~ranked, least).log_softmax(-1).masked_fill(~ranked, 0.0)
    share = attention * ranked
    log_share = (share / share.sum(-1, keepdim=True).clamp(min=1e-30)).clamp(min=1e-30).log()
    return (share * (log_share - log_scores)).sum(-1).mean()


@dataclass(frozen=True)
class LearningRule(SparseRule):
    """Dense attention, from whose queries and keys `matrices` learn.

    Each matrix set comes with a schedule, whose selection rule scores pages by it. For each layer,
    `draw` picks `positions_per_step` of the positions that decode sparsely; `losses` receives the
    divergences of each layer, [matrices] on the device.
    """

    matrices: Sequence[tuple[BudgetSchedule, QueryMatrices]] = ()
    positions_per_step: int = ROWS
    draw: torch.Generator = field(default_factory=torch.Generator)
    losses: list[torch.Tensor] = field(default_factory=list)

    def selected_pages(
        self, query: torch.Tensor, key: torch.Tensor, late: Late, layer: int
    ) -> Iterator[torch.Tensor]:
        """Select all pages, and add to the gradients of the matrices."""
        page_size = self.schedule.page_size
        count, rows = query.shape[0], query.shape[2]
        chosen = torch.randperm(rows, generator=self.draw)[: self.positions_per_step]
        chosen = chosen.to(query.device)
        some, positions = query[:, :, chosen], padding(late, query.device).source[:, chosen]
        attention = attention_by_page(some, key, positions, page_size)
        losses = []
        with torch.enable_grad():
            for schedule, matrices in self.matrices:
                loss = score_divergence(schedule, matrices, some, key, positions, attention, layer)
                loss.backward()
                losses.append(loss.detach())
        self.losses.append(torch.stack(losses))
        pages = self.schedule.num_pages(key.shape[2])
        yield torch.ones(count, key.shape[1], rows, pages, dtype=torch.bool, device=key.device)


@dataclass(frozen=True)
class MeasuredRule(SparseRule):
    """Selects by the schedule's rule, with `matrices` if there are any, or `by_attention` itself.

    Micro-batches must have one sequence. `kept` receives for each layer fp32 [3, R] of the
    positions from `first` on: the attention of the kept pages, of the kept pages that compete, and
    of all pages that compete; means over the KV heads.
    """

    matrices: QueryMatrices | None = None
    by_attention: bool = False
    kept: list[torch.Tensor] = field(default_factory=list)
    first: list[int] = field(default_factory=list)

    def selected_pages(
        self, query: torch.Tensor, key: torch.Tensor, late: Late, layer: int
    ) -> Iterator[torch.Tensor]:
        assert len(late) == 1, "one sequence at a time"
        page_size = self.schedule.page_size
        positions = padding(late, query.device).source
        parts: list[torch.Tensor] = []
        for kept in self._chosen(query, key, late, layer):
            start = sum(part.shape[1] for part in parts)
            inside = []
            for rows in torch.arange(kept.shape[2], device=query.device).split(ROWS):
                places = positions[:, start + rows]
                known = key[:, :, : kept.shape[3] * page_size]
                attention = attention_by_page(query[:, :, start + rows], known, places, page_size)
                found = kept[:, :, rows]
                ranked = ranked_pages(places, kept.shape[3], self.schedule)
                shares = (found, found & ranked, ranked)
                inside.append(torch.stack([(attention * x).sum(-1).mean(1)[0] for x in shares]))
            parts.append(torch.cat(inside, dim=1))
            yield kept
        self.kept.append(torch.cat(parts, dim=1))
        self.first[:] = [late[0][0]]

    def _chosen(
        self, query: torch.Tensor, key: torch.Tensor, late: Late, layer: int
    ) -> Iterator[torch.Tensor]:
        if not self.by_attention:
            scoring = self.matrices.applied(query, layer) if self.matrices else query
            yield from super().selected_pages(scoring, key, late, layer)
            return
        schedule, positions = self.schedule, padding(late, query.device).source
        read = self.pages_read(schedule.num_pages(key.shape[2]), layer, query.device)
        for rows in torch.arange(query.shape[2], device=query.device).split(ROWS):
            places = positions[:, rows]
            scores = attention_by_page(query[:, :, rows], key, places, schedule.page_size)
            yield best_pages(scores, places, read, schedule, layer)
