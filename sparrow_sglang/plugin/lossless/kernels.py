"""Kernels of a round's sampling, which `drafts.py` defines. Launches are few, as at small batches
they take more time than the kernels. What varies from round to round is no constant of a kernel, as
it would be compiled again while requests run.

Probabilities are computed where they are needed, from logits and the maximum and sum of their row.
Numbers between kernels are fp32, which holds tokens exactly:
- of a chunk of a row of logits: maximum, sum of exponentials, first token with the maximum;
- of a chunk of the row to draw from: the largest ratio of residual and clock, and its token.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sparrow_sglang.planning.rounds import Plan
from sparrow_sglang.plugin.lossless.drafts import (
    Drafts,
    Outcome,
    Requests,
    Written,
    distribution,
    truncates,
)
from sparrow_sglang.plugin.lossless.lookups import Histories
from sparrow_sglang.plugin.lossless.round_kernels import begin_kernel, end_kernel

if TYPE_CHECKING:
    from sparrow_sglang.plugin.lossless.passes import Passes

_CHUNK = 8192  # tokens of a row that a program reads


@triton.jit
def exponential(seed: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Samples of the exponential distribution, above 0, one for each offset."""
    uniform = tl.rand(seed, offset) + 2.3283064365386963e-10
    # The clock that is first among many is close to 0, where 1 - uniform would round.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    return tl.where(uniform < 0.0078125, series, -tl.log(1.0 - uniform))


@triton.jit
def _first_where(mask: tl.tensor, tokens: tl.tensor, V: tl.constexpr) -> tl.tensor:
    """The lowest of the masked `tokens`; valid even if there is none, as among logits of NaN."""
    return tl.minimum(tl.min(tl.where(mask, tokens, V), axis=0), V - 1)


@triton.jit
def _group_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    logits_stride: tl.tensor,
    best_stride: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (block, request) finds the likeliest tokens of BLOCK groups."""
    request = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, MEMBERS)[:, None] * G + group[None, :]
    mask = (token < V) & (group[None, :] < G)
    values = tl.load(logits + request * logits_stride + token, mask=mask, other=float("-inf"))
    values = values.to(tl.float32)
    top = tl.max(values, axis=0)
    first = _first_where(mask & (values == top[None, :]), token, V)
    tl.store(best + request * best_stride + group, top, mask=group < G)
    tl.store(ids + request * best_stride + group, first, mask=group < G)


@triton.jit(
    do_not_specialize=["seed", "number"], do_not_specialize_on_alignment=["best", "ids", "tokens"]
)
def _sample_kernel(
    best: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    number: tl.tensor,
    best_stride: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (request) replaces candidates' logits by their probabilities, and samples one."""
    request = tl.program_id(0)
    slot = tl.arange(0, WIDTH)
    mask = slot < G
    at = request.to(tl.int64) * best_stride + slot
    logits = tl.load(best + at, mask=mask, other=float("-inf"))
    candidate = tl.load(ids + at, mask=mask, other=V)
    top = tl.max(logits, axis=0)
    temperature = tl.load(temperatures + request)
    if temperature < 0:
        token = _first_where(logits == top, candidate, V)
        q = (candidate == token).to(tl.float32)
    else:
        weight = tl.exp((logits - top) / temperature)
        q = weight / tl.sum(weight, axis=0)
        offset = (number * tl.num_programs(0) + request) * WIDTH + slot
        arrival = q / exponential(seed, offset)
        token = _first_where(arrival == tl.max(arrival, axis=0), candidate, V)
    tl.store(best + at, q, mask=mask)
    tl.store(tokens + request, token.to(tl.int64))


@triton.jit
def _chunk_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    of_chunks: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (chunk, row, request) reduces a chunk of a row of logits."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < V
    at = request * request_stride + row.to(tl.int64) * row_stride + token
    values = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp((values - shift) / tl.load(temperatures + request)), axis=0)
    out = of_chunks + ((request * tl.num_programs(1) + row) * tl.num_programs(0) + chunk) * 3
    tl.store(out, peak)
    tl.store(out + 1, total)
    tl.store(out + 2, _first_where(mask & (values == peak), token, V).to(tl.float32))


@triton.jit
def _of_row(values: tl.tensor, row: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """The one of `values` that is at `row`."""
    return tl.sum(tl.where(rows == row, values, 0), axis=0)


@triton.jit(
    do_not_specialize=["seed", "tokens_request", "tokens_row", "sampled", "chunks", "count"],
    do_not_specialize_on_alignment=["bonus"],
)
def _accept_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    of_chunks: tl.tensor,
    seed: tl.tensor,
    ids: tl.tensor,
    q: tl.tensor,
    tokens: tl.tensor,
    tokens_request: tl.tensor,
    tokens_row: tl.tensor,
    sampled: tl.tensor,
    count: tl.tensor,
    arrived: tl.tensor,
    arrivals: tl.tensor,
    accepted: tl.tensor,
    bonus: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (chunk, request) judges the drafts, of which the first are `sampled` and the others
    looked up, and draws from a chunk of the row after the accepted ones. The last one to finish
    has the token of all chunks."""
    chunk, request, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    # Reduce the chunks of all rows.
    rows, each = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    real = (rows <= count)[:, None] & (each < chunks)[None, :]
    source = of_chunks + ((request * (count + 1) + rows)[:, None] * chunks + each[None, :]) * 3
    peaks = tl.load(source, mask=real, other=float("-inf"))
    tops = tl.max(peaks, axis=1)
    temperature = tl.load(temperatures + request)
    shift = tl.where(real, peaks - tops[:, None], 0.0)
    totals = tl.load(source + 1, mask=real, other=0.0) * tl.exp(shift / temperature)
    # In a greedy request, whose temperature is -1, the best token has all of the probability.
    greedy = temperature < 0
    totals = tl.where(greedy, float("inf"), tl.sum(totals, axis=1))
    firsts = tl.load(source + 2, mask=real, other=V).to(tl.int32)
    firsts = tl.min(tl.where(real & (peaks == tops[:, None]), firsts, V), axis=1)
    bests = tl.where(greedy, tl.minimum(firsts, V - 1), -1)
    temperature = tl.abs(temperature)
    # Judge the draft after each row.
    drafted = rows < count
    at = tokens + request * tokens_request + (rows + 1) * tokens_row
    drafts = tl.load(at, mask=drafted, other=0)
    of_request = logits + request.to(tl.int64) * request_stride
    values = tl.load(of_request + rows.to(tl.int64) * row_stride + drafts, mask=drafted, other=0.0)
    p_of_draft = tl.exp((values.to(tl.float32) - tops) / temperature) / totals
    p_of_draft += (drafts == bests).to(tl.float32)
    # A draft can only be the candidate of its group.
    of_slots = request.to(tl.int64) * sampled * G
    at_draft = of_slots + rows * G + drafts % G
    candidates = tl.load(ids + at_draft, mask=rows < sampled, other=-1)
    q_of_draft = tl.load(q + at_draft, mask=candidates == drafts, other=0.0)
    q_of_draft = tl.where(rows < sampled, q_of_draft, 1.0)
    coins = tl.rand(seed + 1, request * (count + 1) + rows)
    is_accepted = coins * q_of_draft < p_of_draft
    row = tl.min(tl.where(is_accepted, count, tl.minimum(rows, count)), axis=0)
    # Draw from the residual. No draft follows the last row.
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < V
    at_row = of_request + row.to(tl.int64) * row_stride
    value = tl.load(at_row + token, mask=mask, other=float("-inf")).to(tl.float32)
    best = _of_row(bests, row, rows)
    p = tl.exp((value - _of_row(tops, row, rows)) / temperature) / _of_row(totals, row, rows)
    p += (token == best).to(tl.float32)
    removed = tl.zeros((CHUNK,), tl.float32)
    if row < sampled:
        at_slot = of_slots + row * G + token % G
        candidate = tl.load(ids + at_slot, mask=mask, other=-1)
        removed = tl.load(q + at_slot, mask=candidate == token, other=0.0)
    elif row < count:
        removed = (token == _of_row(drafts, row, rows)).to(tl.float32)
    # As in `drafts.accept`.
    ratio = tl.maximum(p - removed, 0.0) + 1e-20 * p
    ratio /= exponential(seed + 2, request * V + token)
    first = tl.max(ratio, axis=0)
    of_request = arrivals + request * chunks * 2
    tl.store(of_request + chunk * 2, first)
    drawn = _first_where(mask & (ratio == first), token, V)
    tl.store(of_request + chunk * 2 + 1, drawn.to(tl.float32))
    # All threads have stored before the program reports its arrival.
    tl.debug_barrier()
    if tl.atomic_add(arrived + request, 1, sem="acq_rel", scope="gpu") == chunks - 1:
        of_all, inside = of_request + each * 2, each < chunks
        ratios = tl.load(of_all, mask=inside, other=-1.0, cache_modifier=".cg")
        of_best = inside & (ratios == tl.max(ratios, axis=0))
        drawns = tl.load(of_all + 1, mask=inside, other=0.0, cache_modifier=".cg").to(tl.int32)
        tl.store(bonus + request, _first_where(of_best, drawns, V).to(tl.int64))
        tl.store(accepted + request, row.to(tl.int64))


class KernelDrafts(Drafts):
    """Samples and accepts by kernels."""

    def __init__(self, requests: Requests, plan: Plan, passes: "Passes") -> None:
        self._truncates = truncates(requests.sampling)
        # Keys of the random numbers: this one for drafts, the next for acceptance, and then for the
        # token after them. With 63 bits, always.
        self.seed = 1 << 62 | random.getrandbits(61)
        super().__init__(requests, plan, passes)

    def _begin(self, passes: "Passes") -> torch.Tensor:
        rows, committed, _, latest, info, _ = self.requests
        batch, count, device = len(rows), self.plan.rows, rows.device
        # Steps read rows in sequence, and verifications requests, all that there is without a step.
        if self.plan.drafts:
            new = torch.empty(3, count, batch, dtype=torch.int64, device=device)
        else:
            new = torch.empty(3, batch, count, dtype=torch.int64, device=device).mT
        self._strides = new.stride(2), new.stride(1)
        self._temperatures = torch.empty(batch, device=device)
        self._arrived = torch.empty(batch, dtype=torch.int32, device=device)
        table = passes.token_table
        begin_kernel[(batch,)](
            *(table, table.stride(0), passes.context_len, rows, committed, latest),
            *(info.top_ks, info.temperatures, int(self._truncates)),
            *(self._temperatures, self._arrived, new, *self._strides, count),
            WIDTH=triton.next_power_of_2(count),
            num_warps=1,
        )
        return new

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        number, self.count = self.count, self.count + 1
        ids, q, tokens = self.ids[:, number], self.q[:, number], self.tokens[number + 1]
        (batch, vocabulary), groups, block = logits.shape, q.shape[1], 64
        assert logits.stride(1) == 1 and q.stride() == ids.stride()
        sizes = {"V": vocabulary, "G": groups}
        members, width = map(triton.next_power_of_2, (triton.cdiv(vocabulary, groups), groups))
        strides = logits.stride(0), q.stride(0)
        _group_kernel[(triton.cdiv(groups, block), batch)](
            logits, q, ids, *strides, **sizes, MEMBERS=members, BLOCK=block, num_warps=4
        )
        if self._truncates:
            q.copy_(distribution(q, self.info).log_())
        tensors = q, ids, tokens, self._temperatures, self.seed
        _sample_kernel[(batch,)](*tensors, number, q.stride(0), **sizes, WIDTH=width, num_warps=8)
        return tokens

    def verify(self, logits: torch.Tensor) -> Outcome:
        sampled, count = self.plan.drafts, self.plan.drafts + self.plan.lookups
        logits = logits[:, : count + 1]
        if self._truncates:
            logits = distribution(logits, self.info).log_()
        batch, rows, vocabulary = logits.shape
        groups, chunks = self.q.shape[2], triton.cdiv(vocabulary, _CHUNK)
        assert logits.stride(2) == 1 and self.q.is_contiguous() and self.ids.is_contiguous()
        of_chunks = torch.empty(batch, rows, chunks, 3, device=logits.device)
        arrivals = torch.empty(batch, chunks, 2, device=logits.device)
        outcome = torch.empty(2, batch, dtype=torch.int64, device=logits.device)
        dense = logits, self._temperatures, logits.stride(0), logits.stride(1), of_chunks
        _chunk_kernel[(chunks, rows, batch)](*dense, V=vocabulary, CHUNK=_CHUNK, num_warps=8)
        accepted, bonus = outcome
        _accept_kernel[(chunks, batch)](
            *(*dense, self.seed, self.ids, self.q, self._rows, *self._strides, sampled, count),
            *(self._arrived, arrivals, accepted, bonus),
            V=vocabulary,
            G=groups,
            CHUNK=_CHUNK,
            ROWS=triton.next_power_of_2(rows),
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=8,
        )
        return Outcome(accepted, bonus)

    def end(
        self, outcome: Outcome, histories: Histories | None, before: Written | None = None
    ) -> Written:
        committed, sources = self.requests.committed, self.requests.sources
        batch, count, device = len(committed), self.plan.rows, committed.device
        earlier: Sequence[Any] = self._rows, self._arrived, 0
        if before is not None:
            earlier = before.tokens, before.counts, before.tokens.shape[1]
        tokens = torch.empty(batch, earlier[2] + count, dtype=torch.int64, device=device)
        written = Written(tokens, torch.empty_like(self._arrived), torch.empty_like(committed))
        history: Sequence[Any] = self._arrived, 0, self._arrived, 0, self._arrived
        record = histories is not None and sources is not None
        if histories is not None and sources is not None:
            texts, rows = histories.tokens, sources.histories
            history = rows, rows.stride(0), texts, texts.stride(0), histories.lengths
        end_kernel[(batch,)](
            *(self._rows, *self._strides, count, *outcome, committed),
            *(*earlier, *written, *history),
            RECORD=record,
            WIDTH=triton.next_power_of_2(2 * count),
            num_warps=1,
        )
        return written
