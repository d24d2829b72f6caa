"""Sampling of drafts, and their acceptance: speculative sampling along a chain. A draft x, sampled
from q, is accepted with probability min(1, p(x) / q(x)), where p is the dense distribution; after
the first rejection a token is drawn from max(p - q, 0), normalised. The tokens then have exactly
the distribution p, whatever q is (arXiv 2302.01318, 2211.17192), so q may be restricted to some of
the vocabulary, and a token that was looked up is a draft whose q is one. `kernels.py` does the
same. Nothing waits for the device. B is the number of requests, k that of sparse drafts, n that of
all drafts, V the vocabulary, G the groups of candidates."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparrow_sglang.planning.rounds import Plan
from sparrow_sglang.plugin.lossless.lookups import Histories, Sources

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sparrow_sglang.plugin.lossless.passes import Passes

MAX_GROUPS = 4096
"""Token i is in group i mod G, with G at most this, and q is restricted to the likeliest token of
each group. Ids in sequence, such as those of digits, are in different groups."""


class Requests(NamedTuple):
    """The requests of a round.

    Attributes:
        rows: [B], of the token table.
        committed: [B], tokens whose KV is written, all that precede the latest.
        committed_cpu: the same on the host, unless the dense side needs none there.
        latest: [B] int64, the latest token of each, whose KV is not written yet.
        sampling: their `SamplingBatchInfo`.
        sources: where they look tokens up; None where none is.
    """

    rows: torch.Tensor
    committed: torch.Tensor
    committed_cpu: torch.Tensor | None
    latest: torch.Tensor
    sampling: Any
    sources: Sources | None


class Outcome(NamedTuple):
    """Drafts that a verification accepts of each request, and the token after them, [B] int64."""

    accepted: torch.Tensor
    bonus: torch.Tensor


class Written(NamedTuple):
    """What a round has written.

    Attributes:
        tokens: [B, rows] int64, accepted drafts, the token after them and tokens to ignore.
        counts: [B] int32, tokens not to ignore.
        lengths: [B], tokens of the requests whose KV is written.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor

    def followed_by(self, later: "Written") -> "Written":
        """What this round and a `later` one have written, [B, 2 * rows]."""
        tokens = self.join(self.tokens, later.tokens)
        return Written(tokens, self.counts + later.counts, later.lengths)

    def columns_behind(self, rows: int) -> torch.Tensor:
        """Of the tokens of a later round, [B, rows]."""
        return self.counts[:, None] + torch.arange(rows, device=self.counts.device)

    def join(self, of_these: torch.Tensor, of_later: torch.Tensor) -> torch.Tensor:
        """What belongs to these tokens [B, rows], and behind it that of a later round's."""
        rows = of_later.shape[1]
        joined = torch.nn.functional.pad(of_these, (0, rows))
        return joined.scatter_(1, self.columns_behind(rows), of_later)


def distribution(logits: torch.Tensor, info: "SamplingBatchInfo") -> torch.Tensor:
    """The distributions from which requests sample, fp32, of `logits` [B, V] or [B, rows, V].
    `info` has temperatures [B, 1], top_ks, top_ps and min_ps [B]: a greedy request has top_k 1."""
    flat = logits.reshape(-1, logits.shape[-1])
    rows = len(flat) // len(logits)
    probs = torch.softmax(flat.float() / info.temperatures.repeat_interleave(rows, 0), dim=-1)
    if truncates(info):
        probs = _truncated(probs, info, rows)
    if info.is_any_greedy:
        greedy = info.top_ks.repeat_interleave(rows)[:, None] <= 1
        best = torch.zeros_like(probs).scatter_(1, flat.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(greedy, best, probs)
    return probs.view(logits.shape)


def truncates(info: "SamplingBatchInfo") -> bool:
    """Whether requests use top-k, top-p or min-p. SGLang counts the 1 of greedy ones, too."""
    return not info.is_all_greedy and (
        info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    )


def _truncated(probs: torch.Tensor, info: "SamplingBatchInfo", rows: int) -> torch.Tensor:
    """`probs` [B * rows, V] after top-k, top-p and min-p, each defined as in SGLang's sampler.
    Top-p counts the mass before truncation, except beside min-p in SGLang's sampler on a GPU."""
    parameters = info.top_ks, info.top_ps, info.min_ps
    top_ks, top_ps, min_ps = (values.repeat_interleave(rows) for values in parameters)
    if probs.is_cuda:
        from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob

        top_k = top_k_renorm_prob(probs, top_ks) if info.need_top_k_sampling else probs
        base = top_k if info.need_min_p_sampling else probs
        top_p = top_p_renorm_prob(base, top_ps) if info.need_top_p_sampling else probs
        truncated = top_k.masked_fill(top_p <= 0, 0)
    else:
        ordered, order = probs.sort(dim=-1, descending=True)
        rank = torch.arange(probs.shape[1], device=probs.device)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered * ((rank < top_ks[:, None]) & (before <= top_ps[:, None]))
        truncated = torch.zeros_like(probs).scatter_(1, order, ordered)
    if info.need_min_p_sampling:
        least = truncated.amax(-1, keepdim=True) * min_ps[:, None]
        truncated = truncated.masked_fill(truncated < least, 0)
    return truncated / truncated.sum(-1, keepdim=True)


def sample(probs: torch.Tensor) -> torch.Tensor:
    """Index of one column of each row of `probs` [B, C], which need not sum to 1: [B] int64."""
    # The first of several exponential clocks is each with a probability in proportion to its rate.
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def candidates(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids of the likeliest token of each group of `logits` [B, V], both [B, G]."""
    vocabulary = logits.shape[1]
    groups = min(MAX_GROUPS, vocabulary)
    padded = torch.nn.functional.pad(logits, (0, -vocabulary % groups), value=float("-inf"))
    best, member = padded.unflatten(1, (-1, groups)).max(dim=1)
    return best, member * groups + torch.arange(groups, device=logits.device)


class Drafts:
    """Drafts of each request, and the distributions that sparse ones were sampled from.

    Attributes:
        tokens: [rows, B] int64: the latest token, the drafts, then tokens to ignore.
        positions, slots: of them in the text and in the KV pool, [rows, B] int64.
        ids: [B, k, G] int32, the candidates of each sparse draft.
        q: [B, k, G] fp32, their probabilities; all other tokens have none.
        count: sparse drafts until now.
    """

    def __init__(self, requests: Requests, plan: Plan, passes: "Passes") -> None:
        device = requests.rows.device
        shape = len(requests.rows), plan.drafts, min(MAX_GROUPS, passes.vocab_size)
        self.count, self.plan, self.requests, self.info = 0, plan, requests, requests.sampling
        self.ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.q = torch.empty(shape, device=device)
        self._rows = self._begin(passes)
        self.tokens, self.positions, self.slots = self._rows

    def _begin(self, passes: "Passes") -> torch.Tensor:
        """Tokens, which are all the latest, positions and slots, [3, rows, B]."""
        rows, committed, _, latest, *_ = self.requests
        offsets = torch.arange(self.plan.rows, device=rows.device)[:, None]
        positions = committed.long() + offsets
        slots = passes.token_table[rows.long(), positions].long()
        # Past the context no token is returned, and some models have no rotary angles.
        positions = positions.clamp(max=passes.context_len - 1)
        return torch.stack([latest.expand_as(slots), positions, slots])

    def by_request(self) -> tuple[torch.Tensor, ...]:
        """Tokens, positions and slots as they are verified, [B * rows]."""
        return self._rows.mT.reshape(3, -1).unbind()

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample the next draft of each request from the logits [B, V] of a sparse step. Returns
        its row of `tokens`, which may be written."""
        number, self.count = self.count, self.count + 1
        best, ids = candidates(logits)
        self.ids[:, number] = ids
        self.q[:, number] = q = distribution(best, self.info)
        self.tokens[number + 1] = ids.gather(1, sample(q)[:, None]).squeeze(1)
        return self.tokens[number + 1]

    @property
    def looked_up(self) -> torch.Tensor:
        """The rows of `tokens` for tokens that are looked up, [lookups, B], to be written."""
        first = self.plan.drafts + 1
        return self.tokens[first : first + self.plan.lookups]

    def verify(self, logits: torch.Tensor) -> Outcome:
        """Accept a prefix of the drafts in sequence, and draw the token after it. Row j of the
        dense pass's `logits`, [B, rows, V], follows j drafts; rows after the drafts are ignored."""
        count = self.plan.drafts + self.plan.lookups
        p = distribution(logits[:, : count + 1], self.info)
        return accept(self.tokens[1 : count + 1].T, self.ids.long(), self.q, p)

    def end(
        self, outcome: Outcome, histories: Histories | None, before: Written | None = None
    ) -> Written:
        """What the round has written, which `histories` know from now on, behind what one `before`
        it has, of as many rows."""
        accepted, bonus = outcome
        committed, sources = self.requests.committed, self.requests.sources
        tokens = self.tokens.T.roll(-1, 1).scatter_(1, accepted[:, None], bonus[:, None])
        if histories is not None and sources is not None:
            histories.record(sources.histories, committed, tokens, accepted)
        written = Written(tokens, (accepted + 1).int(), committed + accepted + 1)
        return written if before is None else before.followed_by(written)


def accept(tokens: torch.Tensor, ids: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> Outcome:
    """Accept each draft with probability min(1, p / q), and draw the next token of the residual.

    Args:
        tokens: [B, n]; draft j < k is sampled from q[:, j], the others are looked up.
        ids: [B, k, G] int64, distinct candidates.
        q: [B, k, G], their probabilities; all other tokens have none.
        p: [B, n + 1, V], dense distributions.
    """
    (n, k), vocabulary = (tokens.shape[1], ids.shape[1]), p.shape[2]
    dense_q = torch.nn.functional.one_hot(tokens, vocabulary).to(p.dtype)
    dense_q[:, :k] = torch.zeros_like(p[:, :k]).scatter_(2, ids, q)
    p_of_draft, q_of_draft = (x[:, :n].gather(2, tokens[..., None])[..., 0] for x in (p, dense_q))
    is_accepted = torch.rand_like(p_of_draft) * q_of_draft < p_of_draft
    accepted = is_accepted.long().cumprod(1).sum(1)
    # No draft follows the last row.
    removed = torch.nn.functional.pad(dense_q, (0, 0, 0, 1))
    each = torch.arange(len(tokens), device=tokens.device)
    p_next, q_next = p[each, accepted], removed[each, accepted]
    # Where p = q up to rounding, a rejection has no residual. Elsewhere 1e-20 changes nothing.
    residual = (p_next - q_next).clamp(min=0) + 1e-20 * p_next
    return Outcome(accepted, sample(residual))
