"""Kernels of a round's sampling, which `drafts.py` defines.

Probabilities are computed where they are needed, from logits and the maximum and sum of their row.
Numbers between kernels are fp32, which holds tokens exactly:
- of a chunk of a row of logits: maximum, sum of exponentials, first token with the maximum;
- of a row: maximum, sum, best token of a greedy request or -1, whether the draft after it is
  accepted. The sum is infinite in a greedy request, whose temperature is -1;
- of a chunk of the row to draw from: the largest ratio of residual and clock, and its token.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sparrow_sglang.planning.rounds import Plan
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome, distribution, truncates

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

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


# The alignment of a row depends on the batch.
@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=["tokens"])
def _sample_kernel(
    best: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
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
        arrival = q / exponential(tl.load(seeds), offset)
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


@triton.jit(do_not_specialize=["sampled", "chunks"])
def _judge_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    seeds: tl.tensor,
    ids: tl.tensor,
    q: tl.tensor,
    drafts_stride: tl.tensor,
    tokens: tl.tensor,
    sampled: tl.tensor,
    of_chunks: tl.tensor,
    of_rows: tl.tensor,
    chunks: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (row, request) reduces the chunks of a row, and judges the draft after it. The first
    drafts are `sampled`, the others looked up."""
    row, request = tl.program_id(0), tl.program_id(1)
    index = request * tl.num_programs(0) + row
    chunk = tl.arange(0, CHUNKS)
    real = chunk < chunks
    source = of_chunks + (index * chunks + chunk) * 3
    peak = tl.load(source, mask=real, other=float("-inf"))
    top = tl.max(peak, axis=0)
    temperature = tl.load(temperatures + request)
    total = tl.load(source + 1, mask=real, other=0.0) * tl.exp((peak - top) / temperature)
    total = tl.where(temperature < 0, float("inf"), tl.sum(total, axis=0))
    first = tl.load(source + 2, mask=real, other=V).to(tl.int32)
    best = _first_where(real & (peak == top), first, V)
    best = tl.where(temperature < 0, best, -1)
    of_row = of_rows + index * 4
    tl.store(of_row, top)
    tl.store(of_row + 1, total)
    tl.store(of_row + 2, best.to(tl.float32))
    if row + 1 < tl.num_programs(0):
        draft = tl.load(tokens + (row + 1) * tl.num_programs(1) + request)
        at_row = request.to(tl.int64) * request_stride + row.to(tl.int64) * row_stride
        value = tl.load(logits + at_row + draft).to(tl.float32)
        p_of_draft = tl.exp((value - top) / tl.abs(temperature)) / total
        p_of_draft += (draft == best).to(tl.float32)
        q_of_draft = 1.0
        if row < sampled:
            slot = tl.arange(0, WIDTH)
            mask = slot < G
            at_slot = request.to(tl.int64) * drafts_stride + row * G + slot
            candidate = tl.load(ids + at_slot, mask=mask, other=-1)
            q_of_slot = tl.load(q + at_slot, mask=candidate == draft, other=0.0)
            q_of_draft = tl.sum(q_of_slot, axis=0)
        coin = tl.rand(tl.load(seeds + 1), index)
        tl.store(of_row + 3, (coin * q_of_draft < p_of_draft).to(tl.float32))


@triton.jit(do_not_specialize=["sampled", "count"])
def _residual_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    seeds: tl.tensor,
    ids: tl.tensor,
    q: tl.tensor,
    drafts_stride: tl.tensor,
    tokens: tl.tensor,
    sampled: tl.tensor,
    of_rows: tl.tensor,
    arrivals: tl.tensor,
    accepted: tl.tensor,
    count: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (chunk, request) draws from a chunk of the row after the accepted drafts."""
    chunk, request = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    of_request = of_rows + request * (count + 1) * 4
    is_accepted = tl.load(of_request + rows * 4 + 3, mask=rows < count, other=1.0)
    row = tl.min(tl.where(is_accepted == 0.0, rows, count), axis=0)
    tl.store(accepted + request, row.to(tl.int64))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < V
    at_row = request.to(tl.int64) * request_stride + row.to(tl.int64) * row_stride
    values = tl.load(logits + at_row + token, mask=mask, other=float("-inf"))
    of_row = of_request + row * 4
    top, total, best = tl.load(of_row), tl.load(of_row + 1), tl.load(of_row + 2)
    temperature = tl.abs(tl.load(temperatures + request))
    p = tl.exp((values.to(tl.float32) - top) / temperature) / total + (token == best).to(tl.float32)
    # No draft follows the last row.
    removed = tl.zeros((CHUNK,), tl.float32)
    if row < sampled:
        at_slot = request.to(tl.int64) * drafts_stride + row * G + token % G
        candidate = tl.load(ids + at_slot, mask=mask, other=-1)
        removed = tl.load(q + at_slot, mask=candidate == token, other=0.0)
    elif row < count:
        draft = tl.load(tokens + (row + 1) * tl.num_programs(1) + request)
        removed = (token == draft).to(tl.float32)
    clock = exponential(tl.load(seeds + 2), request * V + token)
    # As in `drafts.accept`.
    ratio = (tl.maximum(p - removed, 0.0) + 1e-20 * p) / clock
    first = tl.max(ratio, axis=0)
    out = arrivals + (request * tl.num_programs(0) + chunk) * 2
    tl.store(out, first)
    tl.store(out + 1, _first_where(mask & (ratio == first), token, V).to(tl.float32))


class KernelDrafts(Drafts):
    """Samples and accepts by kernels."""

    def __init__(
        self, latest: torch.Tensor, plan: Plan, vocabulary: int, info: "SamplingBatchInfo"
    ) -> None:
        super().__init__(latest, plan, vocabulary, info)
        self._truncates = truncates(info)
        # Truncated probabilities are handed over as logits.
        positive = 1.0 if self._truncates else info.temperatures[:, 0]
        self._temperatures = torch.where(info.top_ks > 1, positive, -1.0)
        # Keys of the random numbers: for drafts, acceptance, and the token after them.
        self.seeds = torch.empty(3, dtype=torch.int64, device=latest.device).random_()

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
        tensors = q, ids, tokens, self._temperatures, self.seeds
        _sample_kernel[(batch,)](*tensors, number, q.stride(0), **sizes, WIDTH=width, num_warps=8)
        return tokens

    def verify(self, logits: torch.Tensor) -> Outcome:
        logits = logits[:, : self.plan.drafts + self.plan.lookups + 1]
        if self._truncates:
            logits = distribution(logits, self.info).log_()
        batch, rows, vocabulary = logits.shape
        groups, chunks = self.q.shape[2], triton.cdiv(vocabulary, _CHUNK)
        sampled = self.plan.drafts
        width, chunk_width, row_width = map(triton.next_power_of_2, (groups, chunks, rows))
        assert logits.stride(2) == 1 and self.q.is_contiguous() and self.ids.is_contiguous()
        of_chunks = torch.empty(batch, rows, chunks, 3, device=logits.device)
        of_rows = torch.empty(batch, rows, 4, device=logits.device)
        arrivals = torch.empty(batch, chunks, 2, device=logits.device)
        accepted = torch.empty(batch, dtype=torch.int64, device=logits.device)
        dense = logits, self._temperatures, logits.stride(0), logits.stride(1)
        drafted = self.seeds, self.ids, self.q, sampled * groups, self.tokens, sampled
        _chunk_kernel[(chunks, rows, batch)](
            *dense, of_chunks, V=vocabulary, CHUNK=_CHUNK, num_warps=8
        )
        sizes = {"V": vocabulary, "G": groups, "num_warps": 8}
        judged = of_chunks, of_rows, chunks
        _judge_kernel[(rows, batch)](
            *dense, *drafted, *judged, **sizes, WIDTH=width, CHUNKS=chunk_width
        )
        drawn = of_rows, arrivals, accepted, rows - 1
        _residual_kernel[(chunks, batch)](
            *dense, *drafted, *drawn, **sizes, CHUNK=_CHUNK, ROWS=row_width
        )
        ratios, tokens = arrivals.unbind(2)
        bonus = tokens.gather(1, ratios.argmax(1, keepdim=True))[:, 0].long()
        return Outcome(accepted, bonus)
