"""Drafts from what a request and the others of its prompt have said before.

In: prompts, and tokens as they are sampled. Out: the tokens that followed the longest earlier
occurrence of a request's last tokens. Everything that depends on sampled tokens stays on the device
and has shapes that the host knows, so that nothing waits for the device.
"""

from collections.abc import Sequence

import torch

SHORTEST, LONGEST = 2, 8
"""Tokens that must match before a draft is made, and that are compared at most."""
SIBLINGS = 8
"""Other requests of the same prompt whose text a request's drafts may come from."""


def num_bytes(rows: int, max_tokens: int) -> int:
    """About the memory that `TokenHistories` holds between two steps."""
    return 2 * rows * max_tokens * torch.int32.itemsize


class TokenHistories:
    """The tokens of each request, also for a while after it has finished.

    A request is named by its row in SGLang's token table. Requests with the same prompt are
    siblings: each also drafts from the text of the others. There is room for twice as many texts as
    requests may run; the text that has gone longest without a step makes room for a new one.

    Args:
        rows: rows of the token table.
        max_tokens: tokens that a request may have.
        vocab_size: token ids are below it.
        device: where the tables live.
    """

    def __init__(
        self, rows: int, max_tokens: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self._vocab_size, self._texts = vocab_size, 2 * rows
        # The last text is always empty: it stands for a sibling that is not there.
        self._tokens = torch.zeros(2 * rows + 1, max_tokens, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(2 * rows + 1, dtype=torch.int64, device=device)
        self._sources = torch.full((2 * rows + 1, 1 + SIBLINGS), 2 * rows, device=device)
        self._text_of_row = torch.zeros(rows, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all text; no request is running."""
        self._lengths.zero_()
        self._text_at: dict[int, int] = {}
        # By text, the one that has gone longest without a step first.
        self._prompt_of: dict[int, bytes] = {}
        self._texts_of: dict[bytes, list[int]] = {}
        self._longest = [0] * (self._texts + 1)
        self._kept_sources: dict[int, list[int]] = {}

    def start(
        self, rows: Sequence[int], prompts: Sequence[bytes], texts: Sequence[Sequence[int]]
    ) -> None:
        """Begin the texts of the requests in these rows; `prompts` tell which are siblings."""
        places, changed = [], set[int]()
        for row, prompt, tokens in zip(rows, prompts, texts, strict=True):
            if len(self._prompt_of) < self._texts:
                text = len(self._prompt_of)
            else:
                text = next(iter(self._prompt_of))
                self._texts_of[self._prompt_of[text]].remove(text)
                changed.update(self._texts_of[self._prompt_of.pop(text)])
            places.append(text)
            self._text_at[row], self._prompt_of[text] = text, prompt
            group = self._texts_of.setdefault(prompt, [])
            group.append(text)
            changed.update(group)
            self._longest[text] = len(tokens)
            self._tokens[text, : len(tokens)] = self._uploaded(tokens, torch.int32)
        for text in changed:
            others = [other for other in self._texts_of[self._prompt_of[text]] if other != text]
            self._kept_sources[text] = [text, *others[-SIBLINGS:]]
        index = self._uploaded(places, torch.int64)
        self._text_of_row[self._uploaded([*rows], torch.int64)] = index
        self._lengths[index] = self._uploaded([*map(len, texts)], torch.int64)
        padding = [self._texts] * SIBLINGS
        self._sources[self._uploaded([*changed], torch.int64)] = self._uploaded(
            [(self._kept_sources[text] + padding)[: 1 + SIBLINGS] for text in changed], torch.int64
        )
        if len(self._texts_of) > self._texts:
            self._texts_of = {prompt: group for prompt, group in self._texts_of.items() if group}

    def _uploaded(self, values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        # Pinned memory is recycled only once the copy out of it is over.
        pinned = torch.tensor(values, dtype=dtype, pin_memory=self._tokens.is_cuda)
        return pinned.to(self._tokens.device, non_blocking=True)

    def append(self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Add the first `counts` [B] of `tokens` [B, n] to the requests in these rows [B]."""
        text = self._text_of_row[rows]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        # Those past the count are overwritten by what comes next.
        place = (self._lengths[text][:, None] + position).clamp_max(self._tokens.shape[1] - 1)
        self._tokens[text[:, None], place] = tokens.int()
        self._lengths[text] += counts

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """The last token of the request in each of these rows [B], int64 [B]."""
        text = self._text_of_row[rows]
        return self._tokens[text, (self._lengths[text] - 1).clamp_min(0)].long()

    def draft(
        self, rows: torch.Tensor, rows_cpu: Sequence[int], at_most: Sequence[int], count: int
    ) -> torch.Tensor:
        """The `count` tokens that are likely to follow, for the request in each of these rows.

        Of all places in the text of a request and its siblings whose last tokens agree with the
        request's own in most tokens, at least SHORTEST and at most LONGEST, the token that follows
        most of them, and of several the one with the lowest id. The next one is drafted as if this
        one had been sampled. A request without such a place gets its last token again.

        Args:
            rows: [B], and `rows_cpu` the same on the host.
            at_most: upper bounds of the tokens that each of them holds.

        Returns:
            [B, count] int64.
        """
        sources: set[int] = set()
        for row, length in zip(rows_cpu, at_most, strict=True):
            own = self._text_at[row]
            self._longest[own] = length
            self._prompt_of[own] = self._prompt_of.pop(own)
            sources.update(self._kept_sources[own])
        width = min(max(self._longest[source] for source in sources), self._tokens.shape[1])
        own_texts = self._text_of_row[rows]
        kept = self._sources[own_texts]
        text = self._tokens[:, :width][kept]
        follows = text.roll(-1, -1).long()
        place = torch.arange(width, device=text.device)
        is_followed = place + 1 < self._lengths[kept][..., None]
        matched, last = self._suffix_matches(text, own_texts), self.last(rows)
        drafts = []
        for _ in range(count):
            usable = matched.masked_fill(~is_followed, 0).flatten(1)
            best = usable.amax(-1, keepdim=True)
            votes = torch.zeros(
                len(rows), self._vocab_size, dtype=torch.int32, device=text.device
            ).scatter_add_(1, follows.flatten(1), ((usable == best) & (best >= SHORTEST)).int())
            most = votes.max(-1)
            last = torch.where(most.values > 0, votes.argmax(-1), last)
            drafts.append(last)
            # A place matches in one token more than the place before it, or not at all.
            before = torch.nn.functional.pad(matched, (1, 0))[..., :-1]
            matched = (before + 1).clamp_max(LONGEST) * (text == last[:, None, None])
        return torch.stack(drafts, dim=1)

    def _suffix_matches(self, text: torch.Tensor, own_texts: torch.Tensor) -> torch.Tensor:
        """How many of the last LONGEST tokens of these texts [B] agree with those up to each place.

        `text` is [B, S, W]; so is the result, int32.
        """
        end = self._lengths[own_texts]
        matched = torch.zeros_like(text)
        agree = torch.ones_like(text, dtype=torch.bool)
        for back in range(LONGEST):
            own = self._tokens[own_texts, (end - 1 - back).clamp_min(0)]
            same = (text == own[:, None, None]) & (end > back)[:, None, None]
            # Token `back` before a place, where there is one.
            agree &= torch.nn.functional.pad(same, (back, 0))[..., : text.shape[-1]]
            matched += agree
        return matched
