"""Drafts from what a request and the others of its prompt have said before.

In: prompts, and tokens as they are sampled. Out: the tokens that followed the longest earlier
occurrence of a request's last tokens. Everything that depends on sampled tokens stays on the device
and has shapes that the host knows, so that nothing waits for the device.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

SHORTEST, LONGEST = 2, 8
"""Tokens that must match before a draft is made, and that are compared at most."""
SIBLINGS = 7
"""Other requests of the same prompt whose text a request's drafts may come from."""
PARTS = 16
"""Parts of a text, each of which has one vote."""


def num_bytes(rows: int, max_tokens: int) -> int:
    """About the memory that `TokenHistories` holds between two steps."""
    return 2 * rows * max_tokens * torch.int32.itemsize


def uploaded(
    values: Sequence[object], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A tensor of `values` on the device, without waiting for it."""
    # Pinned memory is recycled only once the copy out of it is over.
    pinned = torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    return pinned.to(device, non_blocking=True)


class Texts(NamedTuple):
    """Token histories on the device.

    tokens: [T + 1, W] int32; the last text is always empty: it stands for a sibling that is not
    there. lengths: [T + 1] int64. sources: [T + 1, 1 + SIBLINGS] int64, for each text those that
    its drafts come from, itself first. text_of_row: [rows] int64, the text of the request in each
    row of SGLang's token table.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    sources: torch.Tensor
    text_of_row: torch.Tensor


class Drafts(NamedTuple):
    """Tokens of a pass: of each request the last one sampled, and its drafts, all [B, n] int64.

    positions: of the tokens in their request. slots: where SGLang keeps their KV.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class TokenHistories:
    """The tokens of each request, also for a while after it has finished.

    A request is named by its row in SGLang's token table. Requests with the same prompt are
    siblings: each also drafts from the text of the others. There is room for twice as many texts as
    requests may run; the one whose row was given to another request first makes room for a new one.

    Args:
        rows: rows of the token table.
        max_tokens: tokens that a request may have, those of the last step included.
        device: where the tables live.
    """

    def __init__(self, rows: int, max_tokens: int, device: torch.device | str) -> None:
        self._none = 2 * rows
        self.texts = Texts(
            tokens=torch.zeros(2 * rows + 1, max_tokens, dtype=torch.int32, device=device),
            lengths=torch.zeros(2 * rows + 1, dtype=torch.int64, device=device),
            sources=torch.full((2 * rows + 1, 1 + SIBLINGS), 2 * rows, device=device),
            text_of_row=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.clear()

    def clear(self) -> None:
        """Forget all text; no request is running."""
        self.texts.lengths.zero_()
        self._text_at: dict[int, int] = {}
        # Those of no row, the one to be replaced next first.
        self._free = deque(range(self._none))
        self._prompt_of: dict[int, bytes] = {}
        self._texts_of: dict[bytes, list[int]] = {}

    def start(
        self, rows: Sequence[int], prompts: Sequence[bytes], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Begin the texts of the requests in these rows; `prompts` tell which are siblings."""
        places, changed = [], set[int]()
        for row, prompt, said in zip(rows, prompts, tokens, strict=True):
            text = self._free.popleft()
            if row in self._text_at:
                self._free.append(self._text_at[row])
            if text in self._prompt_of:
                changed.update(self._leave_group(text))
            places.append(text)
            self._text_at[row], self._prompt_of[text] = text, prompt
            group = self._texts_of.setdefault(prompt, [])
            group.append(text)
            changed.update(group)
            self.texts.tokens[text, : len(said)] = self._uploaded(said, torch.int32)
        sources = []
        for text in changed:
            others = [other for other in self._texts_of[self._prompt_of[text]] if other != text]
            padding = [self._none] * SIBLINGS
            sources.append([text, *others[-SIBLINGS:], *padding][: 1 + SIBLINGS])
        index = self._uploaded(places, torch.int64)
        self.texts.text_of_row[self._uploaded([*rows], torch.int64)] = index
        self.texts.lengths[index] = self._uploaded([*map(len, tokens)], torch.int64)
        of_changed = self._uploaded([*changed], torch.int64)
        self.texts.sources[of_changed] = self._uploaded(sources, torch.int64)

    def _leave_group(self, text: int) -> list[int]:
        """Take a text out of its group; returns the others."""
        prompt = self._prompt_of.pop(text)
        group = self._texts_of[prompt]
        group.remove(text)
        if not group:
            del self._texts_of[prompt]
        return group

    def _uploaded(self, values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return uploaded(values, dtype, self.texts.tokens.device)

    def accept(
        self, rows: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Add what was sampled, up to the first token that differs from the draft of its place.

        Args:
            rows: [B].
            tokens: [B, n], the last token of each request and its drafts, as `draft` returns them.
            sampled: [B, n], what was sampled after each of them.

        Returns:
            How many tokens each request has been given, [B] int64, 1 to n.
        """
        if rows.is_cuda:
            from sparrow_sglang.plugin.drafting import kernels

            return kernels.accept(self.texts, rows, tokens, sampled)
        counts = 1 + (tokens[:, 1:] == sampled[:, :-1]).cumprod(-1).sum(-1)
        text = self.texts.text_of_row[rows]
        # Those past the count are overwritten by what comes next.
        place = self.texts.lengths[text][:, None] + torch.arange(sampled.shape[1])
        self.texts.tokens[text[:, None], place] = sampled.int()
        self.texts.lengths[text] += counts
        return counts

    def draft(
        self, rows: torch.Tensor, count: int, seq_lens: torch.Tensor, slot_table: torch.Tensor
    ) -> Drafts:
        """The last token of the request in each of these rows [B], and `count` likely next ones.

        Of all places in the text of a request and its siblings whose last tokens agree with the
        request's own in most tokens, at least SHORTEST and at most LONGEST, the last one in each
        part of each text has a vote. Drafted is the token that follows most of them, and of several
        the one that follows the latest place, first of the own text. Those that it does not follow
        have no vote on the next one. Where none is left, a token is drafted again.

        Args:
            rows: [B] int64.
            count: drafts of each request.
            seq_lens: [B], cached tokens of each request, the last one not among them.
            slot_table: [rows, positions] int32, KV slot of each token of each request.
        """
        if rows.is_cuda:
            from sparrow_sglang.plugin.drafting import kernels

            return kernels.draft(self.texts, rows, count, seq_lens, slot_table)
        positions = seq_lens[:, None] + torch.arange(1 + count)
        slots = slot_table[rows[:, None], positions].long()
        return Drafts(draft_in_torch(self.texts, rows, count), positions, slots)


def draft_in_torch(texts: Texts, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens of `TokenHistories.draft`, on a CPU."""
    own = texts.text_of_row[rows]
    end, kept = texts.lengths[own], texts.sources[own]
    lengths = texts.lengths[kept][..., None]
    text = texts.tokens[:, : int(lengths.max())][kept].long()
    place = torch.arange(text.shape[-1])
    agree = place + 1 < lengths
    matched = torch.zeros_like(text)
    for back in range(LONGEST):
        token = texts.tokens[own, (end - 1 - back).clamp_min(0)]
        same = (text == token[:, None, None]) & (end > back)[:, None, None]
        # Token `back` before a place, where there is one.
        agree = agree & torch.nn.functional.pad(same, (back, 0))[..., : text.shape[-1]]
        matched += agree
    part = place // (-(-lengths // PARTS)).clamp_min(1)
    found = torch.full((*kept.shape, PARTS), -1).scatter_reduce(
        -1,
        part.clamp_max(PARTS - 1),
        torch.where(matched >= SHORTEST, matched * text.shape[-1] + place, -1),
        "amax",
    )
    length, place = found // text.shape[-1], found % text.shape[-1]
    votes = (length > 0) & (length == length.amax((1, 2), keepdim=True))
    votes, latest = (
        votes.flatten(1),
        torch.arange(PARTS) - PARTS * torch.arange(1 + SIBLINGS)[:, None],
    )
    drafts = [texts.tokens[own, end - 1].long()]
    for ahead in range(1, 1 + count):
        at = (place + ahead).clamp_max(text.shape[-1] - 1)
        follows = text.gather(-1, at).flatten(1)
        votes = votes & (place + ahead < lengths).flatten(1)
        same = (follows[:, :, None] == follows[:, None]) & votes[:, None]
        count_of = same.sum(-1) * votes
        score = count_of * latest.numel() + latest.flatten()
        best = score.argmax(-1, keepdim=True)
        drafts.append(torch.where(votes.any(-1), follows.gather(-1, best).squeeze(-1), drafts[-1]))
        votes = votes & (follows == drafts[-1][:, None])
    return torch.stack(drafts, dim=1)
