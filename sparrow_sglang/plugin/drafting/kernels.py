"""Token histories on a GPU: what `histories` defines, in two launches a step and one after it."""

import torch
import triton
import triton.language as tl

from sparrow_sglang.plugin.drafting.histories import (
    LONGEST,
    PARTS,
    SHORTEST,
    SIBLINGS,
    Drafts,
    Texts,
)

_BLOCK = 1024
# A match is one number, its length above the place.
_PLACE_BITS: tl.constexpr = 24


@triton.jit
def _match_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    sources: tl.tensor,
    text_of_row: tl.tensor,
    rows: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    SOURCES: tl.constexpr,
    PARTS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (request, source, part): the longest match in that part, the last one of several."""
    request, source, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(text_of_row + tl.load(rows + request))
    text = tl.load(sources + own * SOURCES + source)
    length = tl.load(lengths + text).to(tl.int32)
    own_end = tl.load(lengths + own).to(tl.int32) - 1
    own_text, text = tokens + own * width, tokens + text * width
    size = tl.cdiv(length, PARTS)
    # The last token of a text is followed by none.
    end = tl.minimum((part + 1) * size, length - 1)
    best = 0
    for start in tl.range(part * size, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        agree = place < end
        matched = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            token = tl.load(own_text + own_end - back, mask=own_end >= back, other=-1)
            there = tl.load(text + place - back, mask=agree & (place >= back), other=-2)
            agree &= there == token
            matched += agree.to(tl.int32)
        key = tl.where(matched >= SHORTEST, (matched << PLACE_BITS) | place, 0)
        best = tl.maximum(best, tl.max(key))
    tl.store(found + (request * SOURCES + source) * PARTS + part, best)


@triton.jit
def _draft_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    sources: tl.tensor,
    text_of_row: tl.tensor,
    rows: tl.tensor,
    found: tl.tensor,
    seq_lens: tl.tensor,
    slot_table: tl.tensor,
    drafts: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    slot_width: tl.tensor,
    SOURCES: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    PLACE_BITS: tl.constexpr,
) -> None:
    """Program (request) writes its last token and COUNT drafts, their positions and KV slots."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    ahead = tl.arange(0, COUNT_PAD)
    position = tl.load(seq_lens + request).to(tl.int64) + ahead
    slot = tl.load(slot_table + row * slot_width + position, mask=ahead <= COUNT, other=0)
    at = request * (1 + COUNT) + ahead
    tl.store(positions + at, position, mask=ahead <= COUNT)
    tl.store(slots + at, slot.to(tl.int64), mask=ahead <= COUNT)
    own = tl.load(text_of_row + row)
    own_length = tl.load(lengths + own)
    token = tl.load(tokens + own * width + own_length - 1, mask=own_length > 0, other=0)
    tl.store(drafts + request * (1 + COUNT), token.to(tl.int64))
    if COUNT > 0:
        VOTES: tl.constexpr = SOURCES * PARTS
        index = tl.arange(0, VOTES)
        key = tl.load(found + request * VOTES + index)
        text = tl.load(sources + own * SOURCES + index // PARTS)
        length = tl.load(lengths + text)
        vote = (key > 0) & (key >> PLACE_BITS == tl.max(key) >> PLACE_BITS)
        place = key & ((1 << PLACE_BITS) - 1)
        # The latest place of the first text comes first among equals.
        rank = (SOURCES - 1 - index // PARTS) * PARTS + index % PARTS
        for ahead in tl.static_range(1, 1 + COUNT):
            vote &= place + ahead < length
            follows = tl.load(tokens + text * width + place + ahead, mask=vote, other=-1)
            same = (follows[:, None] == follows[None, :]) & vote[None, :]
            score = tl.sum(same.to(tl.int32), 1) * VOTES + rank
            score = tl.where(vote, score, -1)
            best = tl.max(score)
            chosen = tl.max(tl.where(vote & (score == best), follows, -1))
            token = tl.where(best >= 0, chosen, token)
            tl.store(drafts + request * (1 + COUNT) + ahead, token.to(tl.int64))
            vote &= follows == token


@triton.jit
def _accept_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    text_of_row: tl.tensor,
    rows: tl.tensor,
    drafts: tl.tensor,
    sampled: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
) -> None:
    """Program (request) adds its sampled tokens up to the first that is not the draft."""
    request = tl.program_id(0)
    text = tl.load(text_of_row + tl.load(rows + request))
    length = tl.load(lengths + text)
    index = tl.arange(0, N_PAD)
    token = tl.load(sampled + request * N + index, mask=index < N, other=0)
    draft = tl.load(drafts + request * N + index + 1, mask=index + 1 < N, other=-1)
    count = 1 + tl.min(tl.where(token == draft, N_PAD, index))
    tl.store(tokens + text * width + length + index, token.to(tl.int32), mask=index < count)
    tl.store(lengths + text, length + count)
    tl.store(counts + request, count.to(tl.int64))


def draft(
    texts: Texts,
    rows: torch.Tensor,
    count: int,
    seq_lens: torch.Tensor,
    slot_table: torch.Tensor,
) -> Drafts:
    """`TokenHistories.draft` for the requests in these rows, [B] int64, on their GPU."""
    batch, sources = len(rows), 1 + SIBLINGS
    found = rows.new_empty(batch, sources, PARTS, dtype=torch.int32)
    drafts = Drafts(*rows.new_empty(3, batch, 1 + count))
    sizes = {"SOURCES": sources, "PARTS": PARTS, "PLACE_BITS": _PLACE_BITS}
    tables, width = (*texts, rows, found), texts.tokens.shape[1]
    if count:
        _match_kernel[(batch, sources, PARTS)](
            *tables, width, SHORTEST=SHORTEST, LONGEST=LONGEST, BLOCK=_BLOCK, **sizes
        )
    _draft_kernel[(batch,)](
        *tables,
        seq_lens,
        slot_table,
        *drafts,
        width,
        slot_table.stride(0),
        COUNT=count,
        COUNT_PAD=triton.next_power_of_2(1 + count),
        num_warps=8,
        **sizes,
    )
    return drafts


def accept(
    texts: Texts, rows: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """`TokenHistories.accept`; all indices and tokens are int32 or int64."""
    counts = rows.new_empty(len(rows), dtype=torch.int64)
    _accept_kernel[(len(rows),)](
        texts.tokens,
        texts.lengths,
        texts.text_of_row,
        rows,
        tokens,
        sampled,
        counts,
        texts.tokens.shape[1],
        N=tokens.shape[1],
        N_PAD=triton.next_power_of_2(tokens.shape[1]),
        num_warps=1,
    )
    return counts
