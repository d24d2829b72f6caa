"""Kernels of a round's sampling, which `acceptance.py` defines. They never wait for the device.

B is the number of requests, k that of drafts of which `count` are drafted, V the vocabulary, G the
groups of candidates: token i is in group i mod G. Probabilities are computed where they are needed,
from logits and the maximum and sum of their row; logits are read in any float dtype, as fp32.
Greedy requests have top_k 1.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sparrow_sglang.plugin.lossless.acceptance import Drafts

_CHUNK = 8192
"""Tokens of a row that a program reads."""
_GROUPS_PER_PROGRAM = 64


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


@triton.jit(do_not_specialize=["number"])
def _sample_kernel(
    best: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
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
    if tl.load(top_ks + request) <= 1:
        token = _first_where(logits == top, candidate, V)
        q = (candidate == token).to(tl.float32)
    else:
        weight = tl.exp((logits - top) / tl.load(temperatures + request))
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
    peaks: tl.tensor,
    sums: tl.tensor,
    firsts: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program (chunk, row, request): maximum, its token, and sum of exponentials of a chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < V
    at = request * request_stride + row.to(tl.int64) * row_stride + token
    values = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp((values - shift) / tl.load(temperatures + request)), axis=0)
    index = (request * tl.num_programs(1) + row) * tl.num_programs(0) + chunk
    tl.store(peaks + index, peak)
    tl.store(sums + index, total)
    tl.store(firsts + index, _first_where(mask & (values == peak), token, V))


@triton.jit
def _probability(
    values: tl.tensor,
    tokens: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    greedy: tl.tensor,
) -> tl.tensor:
    """Probabilities of `tokens`, whose logits are `values`; `greedy` is the best token, or -1."""
    weight = tl.exp((values.to(tl.float32) - top) / temperature) / total
    return tl.where(greedy < 0, weight, (tokens == greedy).to(tl.float32))


@triton.jit(do_not_specialize=["count", "chunks"])
def _judge_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    seeds: tl.tensor,
    tokens: tl.tensor,
    ids: tl.tensor,
    q: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    firsts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    greedy_tokens: tl.tensor,
    is_accepted: tl.tensor,
    rates: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    drafts_stride: tl.tensor,
    count: tl.tensor,
    chunks: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program (row, request) joins the chunks of a row, and judges the draft that follows it."""
    row = tl.program_id(0)
    request = tl.program_id(1)
    index = request * (count + 1) + row
    chunk = tl.arange(0, CHUNKS)
    real = chunk < chunks
    at = index * chunks + chunk
    peak = tl.load(peaks + at, mask=real, other=float("-inf"))
    top = tl.max(peak, axis=0)
    temperature = tl.load(temperatures + request)
    total = tl.load(sums + at, mask=real, other=0.0) * tl.exp((peak - top) / temperature)
    total = tl.sum(total, axis=0)
    first = tl.load(firsts + at, mask=real, other=V)
    greedy = tl.where(
        tl.load(top_ks + request) <= 1, _first_where(real & (peak == top), first, V), -1
    )
    tl.store(tops + index, top)
    tl.store(totals + index, total)
    tl.store(greedy_tokens + index, greedy)
    if row < count:
        # Drafts are stored by step.
        draft = tl.load(tokens + (row + 1) * tl.num_programs(1) + request)
        slot = tl.arange(0, WIDTH)
        mask = slot < G
        at_slot = request.to(tl.int64) * drafts_stride + row * G + slot
        candidate = tl.load(ids + at_slot, mask=mask, other=0)
        q_of_slot = tl.load(q + at_slot, mask=mask, other=0.0)
        at_logit = request.to(tl.int64) * request_stride + row.to(tl.int64) * row_stride
        values = tl.load(logits + at_logit + candidate, mask=mask, other=float("-inf"))
        p = _probability(values, candidate, temperature, top, total, greedy)
        p = tl.where(mask, p, 0.0)
        q_of_draft = tl.sum(tl.where(candidate == draft, q_of_slot, 0.0), axis=0)
        p_of_draft = tl.sum(tl.where(candidate == draft, p, 0.0), axis=0)
        coin = tl.rand(tl.load(seeds + 1), index)
        verdict = request * count + row
        tl.store(is_accepted + verdict, (coin * q_of_draft < p_of_draft).to(tl.int32))
        tl.store(rates + verdict, tl.sum(tl.minimum(q_of_slot, p), axis=0))


@triton.jit
def _accepted(
    is_accepted: tl.tensor, request: tl.tensor, count: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """The number of drafts before the first that is rejected."""
    row = tl.arange(0, ROWS)
    verdict = tl.load(is_accepted + request * count + row, mask=row < count, other=0)
    return tl.min(tl.where((verdict == 0) & (row < count), row, count), axis=0)


@triton.jit(do_not_specialize=["count"])
def _residual_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    ids: tl.tensor,
    q: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    greedy_tokens: tl.tensor,
    is_accepted: tl.tensor,
    arrivals: tl.tensor,
    arrived: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    drafts_stride: tl.tensor,
    count: tl.tensor,
    V: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (chunk, request): the first token of a chunk by residual, and by p alone."""
    chunk = tl.program_id(0)
    request = tl.program_id(1)
    row = _accepted(is_accepted, request, count, ROWS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < V
    at_logit = request.to(tl.int64) * request_stride + row.to(tl.int64) * row_stride
    values = tl.load(logits + at_logit + token, mask=mask, other=float("-inf"))
    index = request * (count + 1) + row
    p = _probability(
        values,
        token,
        tl.load(temperatures + request),
        tl.load(tops + index),
        tl.load(totals + index),
        tl.load(greedy_tokens + index),
    )
    # No draft follows the last row.
    at_slot = request.to(tl.int64) * drafts_stride + row * G + token % G
    candidate = tl.load(ids + at_slot, mask=mask & (row < count), other=-1)
    removed = tl.load(q + at_slot, mask=candidate == token, other=0.0)
    clock = exponential(tl.load(seeds + 2), request * V + token)
    by_residual = tl.maximum(p - removed, 0.0) / clock
    by_p = p / clock
    first_residual = tl.max(by_residual, axis=0)
    first_p = tl.max(by_p, axis=0)
    out = (request * tl.num_programs(0) + chunk) * 2
    tl.store(arrivals + out, first_residual)
    tl.store(arrivals + out + 1, first_p)
    tl.store(arrived + out, _first_where(mask & (by_residual == first_residual), token, V))
    tl.store(arrived + out + 1, _first_where(mask & (by_p == first_p), token, V))


@triton.jit(do_not_specialize=["count", "chunks"])
def _bonus_kernel(
    is_accepted: tl.tensor,
    arrivals: tl.tensor,
    arrived: tl.tensor,
    accepted: tl.tensor,
    bonus: tl.tensor,
    count: tl.tensor,
    chunks: tl.tensor,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (request) picks the first token of all chunks."""
    request = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < chunks
    at = (request * chunks + chunk) * 2
    residual = tl.load(arrivals + at, mask=mask, other=0.0)
    # Where p = q up to rounding, a rejection has no residual.
    at += tl.where(tl.max(residual, axis=0) > 0.0, 0, 1)
    arrival = tl.load(arrivals + at, mask=mask, other=-1.0)
    token = tl.load(arrived + at, mask=mask, other=V)
    token = _first_where(mask & (arrival == tl.max(arrival, axis=0)), token, V)
    tl.store(bonus + request, token.to(tl.int64))
    tl.store(accepted + request, _accepted(is_accepted, request, count, ROWS).to(tl.int64))


def candidates(logits: torch.Tensor, best: torch.Tensor, ids: torch.Tensor) -> None:
    """As `acceptance.candidates` of `logits` [B, V], written to `best` fp32 and `ids` int32 [B, G].

    `best` and `ids` have the same strides.
    """
    batch, vocabulary = logits.shape
    groups = best.shape[1]
    assert logits.stride(1) == best.stride(1) == 1 and best.stride() == ids.stride()
    _group_kernel[(triton.cdiv(groups, _GROUPS_PER_PROGRAM), batch)](
        logits,
        best,
        ids,
        logits.stride(0),
        best.stride(0),
        V=vocabulary,
        G=groups,
        MEMBERS=triton.next_power_of_2(triton.cdiv(vocabulary, groups)),
        BLOCK=_GROUPS_PER_PROGRAM,
        num_warps=4,
    )


def sample(drafts: "Drafts", number: int, temperatures: torch.Tensor, top_ks: torch.Tensor) -> None:
    """Sample draft `number` of each request.

    `drafts.q[:, number]` has the candidates' logits and receives their probabilities; the sampled
    tokens are written to `drafts.tokens[number + 1]`. `temperatures` and `top_ks` have B elements.
    """
    best = drafts.q[:, number]
    batch, groups = best.shape
    _sample_kernel[(batch,)](
        best,
        drafts.ids[:, number],
        drafts.tokens[number + 1],
        temperatures,
        top_ks,
        drafts.seeds,
        number,
        best.stride(0),
        V=drafts.vocabulary,
        G=groups,
        WIDTH=triton.next_power_of_2(groups),
        num_warps=8,
    )


def accept(
    drafts: "Drafts", logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept a prefix of the drafts, and draw the token after it.

    `logits` [B, count + 1, V] are those of the dense pass: row j follows j drafts.

    Returns:
        Accepted drafts and next tokens [B] int64, and rates [B, count] fp32, see
        `acceptance.Outcome`.
    """
    batch, rows, vocabulary = logits.shape
    count, groups = rows - 1, drafts.q.shape[2]
    assert logits.stride(2) == 1 and drafts.q.is_contiguous() and drafts.ids.is_contiguous()
    chunks = triton.cdiv(vocabulary, _CHUNK)
    shapes = {"V": vocabulary, "G": groups}
    chunk_width, row_width = triton.next_power_of_2(chunks), triton.next_power_of_2(rows)
    strides = logits.stride(0), logits.stride(1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    peaks, sums = empty(2, batch, rows, chunks)
    firsts = empty(batch, rows, chunks, dtype=torch.int32)
    _chunk_kernel[(chunks, rows, batch)](
        logits, temperatures, peaks, sums, firsts, *strides, V=vocabulary, CHUNK=_CHUNK, num_warps=8
    )
    tops, totals = empty(2, batch, rows)
    greedy_tokens = empty(batch, rows, dtype=torch.int32)
    is_accepted, rates = empty(batch, count, dtype=torch.int32), empty(batch, count)
    _judge_kernel[(rows, batch)](
        logits,
        temperatures,
        top_ks,
        drafts.seeds,
        drafts.tokens,
        drafts.ids,
        drafts.q,
        peaks,
        sums,
        firsts,
        tops,
        totals,
        greedy_tokens,
        is_accepted,
        rates,
        *strides,
        drafts.q.stride(0),
        count,
        chunks,
        **shapes,
        WIDTH=triton.next_power_of_2(groups),
        CHUNKS=chunk_width,
        num_warps=8,
    )
    arrivals = empty(batch, chunks, 2)
    arrived = empty(batch, chunks, 2, dtype=torch.int32)
    _residual_kernel[(chunks, batch)](
        logits,
        temperatures,
        drafts.seeds,
        drafts.ids,
        drafts.q,
        tops,
        totals,
        greedy_tokens,
        is_accepted,
        arrivals,
        arrived,
        *strides,
        drafts.q.stride(0),
        count,
        **shapes,
        CHUNK=_CHUNK,
        ROWS=row_width,
        num_warps=8,
    )
    accepted, bonus = empty(2, batch, dtype=torch.int64)
    _bonus_kernel[(batch,)](
        is_accepted,
        arrivals,
        arrived,
        accepted,
        bonus,
        count,
        chunks,
        V=vocabulary,
        CHUNKS=chunk_width,
        ROWS=row_width,
        num_warps=1,
    )
    return accepted, bonus, rates
