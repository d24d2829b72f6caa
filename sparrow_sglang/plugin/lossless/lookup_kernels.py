"""Kernels of lookups, which `lookups.py` defines."""

import torch
import triton
import triton.language as tl

from sparrow_sglang.plugin.lossless.lookups import LONGEST_MATCH, Histories, Sources

_BLOCK = 1024  # places that a program compares
# A found place, as one number, of which the largest is the best: tokens that match, whether the
# place is in the request's own history, the place, and the rank of its source.
_RANK_BITS, _OWN_BIT, _LENGTH_BIT = 8, 40, 41


@triton.jit(
    do_not_specialize=["longest", "histories_stride", "request_stride", "token_stride", "count"],
    do_not_specialize_on_alignment=["histories", "written", "new", "accepted"],
)
def _record_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    longest: tl.tensor,
    histories: tl.tensor,
    histories_stride: tl.tensor,
    written: tl.tensor,
    new: tl.tensor,
    request_stride: tl.tensor,
    token_stride: tl.tensor,
    accepted: tl.tensor,
    count: tl.tensor,
    KNOWN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (request) appends to a history."""
    request = tl.program_id(0)
    history = tl.load(histories + request * histories_stride).to(tl.int64)
    first = tl.load(written + request).to(tl.int64) + 1
    number = tl.arange(0, WIDTH)
    source = new + request * request_stride + number * token_stride
    token = tl.load(source, mask=number < count, other=0).to(tl.int32)
    tl.store(tokens + history * longest + first + number, token, mask=number < count)
    if KNOWN:
        tl.store(lengths + history, (first + tl.load(accepted + request) + 1).to(tl.int32))


@triton.jit(
    do_not_specialize=["longest", "table_stride", "further"],
    do_not_specialize_on_alignment=["histories", "others", "prompts"],
)
def _match_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    longest: tl.tensor,
    histories: tl.tensor,
    others: tl.tensor,
    prompts: tl.tensor,
    table_stride: tl.tensor,
    further: tl.tensor,
    best: tl.tensor,
    LONGEST_MATCH: tl.constexpr,
    RANK_BITS: tl.constexpr,
    OWN_BIT: tl.constexpr,
    LENGTH_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (chunk, rank, request) finds the best place of a chunk of a source."""
    rank, request = tl.program_id(1), tl.program_id(2)
    history = tl.load(histories + request * table_stride).to(tl.int64)
    other = tl.load(others + request * table_stride + rank).to(tl.int64)
    if other >= 0:
        own = tl.load(lengths + history) + further
        first, end = 1, own
        if rank > 0:
            first = tl.maximum(tl.load(prompts + request * table_stride), 1)
            end = tl.load(lengths + other)
        begin = tl.program_id(0) * BLOCK
        if begin < end:
            place = begin + tl.arange(0, BLOCK)
            same = (place >= first) & (place < end)
            length = tl.zeros((BLOCK,), tl.int64)
            for back in tl.static_range(1, LONGEST_MATCH + 1):
                mine = tl.load(tokens + history * longest + own - back, mask=own >= back, other=-2)
                here = tokens + other * longest + place - back
                same = same & (tl.load(here, mask=same & (place >= back), other=-1) == mine)
                length += same.to(tl.int64)
            score = (length << LENGTH_BIT) | ((rank == 0).to(tl.int64) << OWN_BIT)
            score |= (place.to(tl.int64) << RANK_BITS) | rank
            tl.atomic_max(best + request, tl.max(tl.where(length > 0, score, 0), axis=0))


@triton.jit(
    do_not_specialize=[
        *("longest", "table_stride", "further", "token_stride", "request_stride", "count")
    ],
    do_not_specialize_on_alignment=["others", "out"],
)
def _propose_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    longest: tl.tensor,
    histories: tl.tensor,
    others: tl.tensor,
    table_stride: tl.tensor,
    further: tl.tensor,
    best: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    request_stride: tl.tensor,
    count: tl.tensor,
    RANK_BITS: tl.constexpr,
    OWN_BIT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (request), of one warp, copies what followed at the best place, and forgets it."""
    request = tl.program_id(0)
    score = tl.load(best + request)
    tl.store(best + request, tl.zeros_like(score))
    rank = score & ((1 << RANK_BITS) - 1)
    place = (score & ((1 << OWN_BIT) - 1)) >> RANK_BITS
    source = tl.load(others + request * table_stride + rank).to(tl.int64)
    end = tl.load(lengths + source).to(tl.int64)
    if rank == 0:
        end += further
    number = tl.arange(0, WIDTH)
    followed = place + number % tl.maximum(end - place, 1)
    at = tokens + source * longest + followed
    token = tl.load(at, mask=(number < count) & (score > 0), other=0)
    at = out + number * token_stride + request * request_stride
    tl.store(at, token.to(tl.int64), mask=number < count)


class KernelHistories(Histories):
    """Appends and looks up by kernels."""

    def __init__(self, requests: int, longest: int, device: torch.device | str) -> None:
        super().__init__(requests, longest, device)
        self._best = torch.zeros(requests, dtype=torch.int64, device=device)

    def record(
        self,
        histories: torch.Tensor,
        written: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None = None,
    ) -> None:
        batch, count = tokens.shape
        assert written.is_contiguous() and (accepted is None or accepted.is_contiguous())
        _record_kernel[(batch,)](
            *(self.tokens, self.lengths, self.tokens.stride(0)),
            *(histories, histories.stride(0), written, tokens, *tokens.stride()),
            *(written if accepted is None else accepted, count),
            KNOWN=accepted is not None,
            WIDTH=triton.next_power_of_2(count),
            num_warps=1,
        )

    def look_up(self, sources: Sources, further: int, out: torch.Tensor) -> None:
        count, batch = out.shape
        histories, others, prompts, longest = sources
        assert others.stride(1) == 1
        assert histories.stride(0) == others.stride(0) == prompts.stride(0)
        texts = self.tokens, self.lengths, self.tokens.stride(0)
        grid = triton.cdiv(longest + further, _BLOCK), others.shape[1], batch
        bits = {"RANK_BITS": _RANK_BITS, "OWN_BIT": _OWN_BIT}
        _match_kernel[grid](
            *(*texts, histories, others, prompts, others.stride(0), further, self._best),
            **bits,
            LENGTH_BIT=_LENGTH_BIT,
            LONGEST_MATCH=LONGEST_MATCH,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        _propose_kernel[(batch,)](
            *(*texts, histories, others, others.stride(0), further, self._best),
            *(out, *out.stride(), count),
            **bits,
            WIDTH=triton.next_power_of_2(count),
            num_warps=1,
        )
