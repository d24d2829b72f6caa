"""Drafts that were written before. The latest tokens of a request are looked up in its prompt and
answer, and in the answers to the same prompt, running or finished; what followed there is proposed.
Any proposal leaves the distribution as it is, so only the number of accepted ones depends on it.
Nothing waits for the device. `lookup_kernels.py` does the same as `record` and `look_up`. B is the
number of requests, S that of sources, H that of histories.

Looking up what follows in the prompt: github.com/apoorvumang/prompt-lookup-decoding; in earlier
answers: arXiv 2411.04975."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

LONGEST_MATCH = 8
_KEPT = 64
"""Histories of finished requests that are kept beside those of running ones."""
_SOURCES = 16


class Sources(NamedTuple):
    """Where the requests of a batch look tokens up.

    Attributes:
        histories: [B] int32, the history of each request.
        others: [B, S] int32, the histories to search, its own first; -1 for none.
        prompts: [B] int32, tokens of the prompt, which are searched in its own history only.
        longest: bound on the tokens of the histories to search.
    """

    histories: torch.Tensor
    others: torch.Tensor
    prompts: torch.Tensor
    longest: int


class _Known(NamedTuple):
    """What the host knows of a history: its request, what requests that may search it share (the
    prompt, and what parts the prefix cache), and how many tokens were copied at the latest
    prefill."""

    rid: str
    key: tuple[bytes, str | None, str | None]
    copied: int


class Histories:
    """Prompts and answers of running requests and the latest finished ones, on the device.

    Attributes:
        tokens: [H, longest] int32. Columns from `lengths` on are not read before they are written.
        lengths: [H] int32, tokens that are known. Zero for an empty history.
    """

    def __init__(self, requests: int, longest: int, device: torch.device | str) -> None:
        count = requests + _KEPT
        self.tokens = torch.zeros(count, longest, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int32, device=device)
        # The one used longest ago first: it is that of a finished request once all are taken, as no
        # more than `requests` run.
        self._known: OrderedDict[int, _Known | None] = OrderedDict.fromkeys(range(count))
        self._of_rid: dict[str, int] = {}
        self._batch: list[int] = []
        self._sources: Sources | None = None

    @staticmethod
    def num_bytes(requests: int, longest: int) -> int:
        return 4 * (requests + _KEPT) * longest

    def prefilled(self, reqs: Sequence["Req"], next_tokens: torch.Tensor) -> None:
        """Copy what requests have received and written until their prefill, and the token [B] after
        it. Of a prompt in chunks the whole is known at the first; the token after a chunk that is
        not the last is replaced by that after the next."""
        texts: list[Any] = []
        rows, totals = [], []
        for req in reqs:
            total = len(req.origin_input_ids) + len(req.output_ids)
            prompt = np.asarray(req.origin_input_ids, np.int32).tobytes()
            key = (prompt, req.extra_key, req.cache_salt)
            row = self._of_rid.get(req.rid)
            known = None if row is None else self._known[row]
            if row is None or known is None or known.key != key:
                row, known = self._evict(), None
                self._of_rid[req.rid] = row
            if known is None or known.copied != total:
                texts.append((row, [*req.origin_input_ids, *req.output_ids]))
            self._known[row] = _Known(req.rid, key, total)
            self._known.move_to_end(row)
            rows.append(row)
            totals.append(total)
        self._sources = None
        if texts:
            flat = self._to_device(np.concatenate([text for _, text in texts]))
            for row, part in zip(texts, flat.split([len(text) for _, text in texts]), strict=True):
                self.tokens[row[0], : len(part)] = part
        self._follow(np.array([rows, totals]), next_tokens)

    def _follow(self, known: np.ndarray, next_tokens: torch.Tensor) -> None:
        """Histories `known[0]` of `known[1]` tokens are followed by these [B]."""
        histories, totals = self._to_device(known)
        none = torch.zeros_like(totals)
        self.record(histories, totals - 1, next_tokens.reshape(-1, 1).long(), none)

    def _evict(self) -> int:
        row, known = next(iter(self._known.items()))
        if known is not None and self._of_rid.get(known.rid) == row:
            del self._of_rid[known.rid]
        return row

    def sources(self, reqs: Sequence["Req"], longest: int) -> Sources:
        """Where running requests of at most `longest` tokens look tokens up."""
        batch = [self._of_rid[req.rid] for req in reqs]
        if self._sources is None or batch != self._batch:
            self._batch = batch
            for row in batch:
                self._known.move_to_end(row)
            by_key: dict[Any, list[int]] = {}
            for row in reversed(self._known):
                if (known := self._known[row]) is not None:
                    by_key.setdefault(known.key, []).append(row)
            others = np.full((len(batch), _SOURCES), -1)
            for i, row in enumerate(batch):
                known = self._known[row]
                assert known is not None, "a request decodes before its prefill"
                siblings = [other for other in by_key[known.key] if other != row]
                found = [row, *siblings[: _SOURCES - 1]]
                others[i, : len(found)] = found
            width = int((others >= 0).sum(1).max())
            prompts = [len(req.origin_input_ids) for req in reqs]
            table = self._to_device(np.column_stack([batch, prompts, others[:, :width]]))
            self._sources = Sources(table[:, 0], table[:, 2:], table[:, 1], 0)
        return self._sources._replace(longest=min(longest, self.tokens.shape[1]))

    def timed(self, requests: int, tokens: int) -> Sources:
        """Sources of requests of `tokens` tokens each, to time a round. `clear` forgets them."""
        rows = np.arange(requests)
        known = np.stack([rows, np.full_like(rows, tokens - 1)])
        self._follow(known, self.lengths.new_zeros(requests))
        table = self._to_device(np.column_stack([rows, np.zeros_like(rows), *[rows] * 8]))
        return Sources(table[:, 0], table[:, 2:], table[:, 1], tokens)

    def clear(self) -> None:
        """Forget all texts, while no request runs."""
        self.lengths.zero_()
        self._of_rid.clear()
        self._known = OrderedDict.fromkeys(self._known)
        self._sources = None

    def record(
        self,
        histories: torch.Tensor,
        written: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None = None,
    ) -> None:
        """Write `tokens` [B, n] behind the first `written` + 1 [B] ones of `histories` [B]. With
        `accepted` [B] that many and one more are known from now on."""
        rows = histories.long()
        columns = written.long()[:, None] + 1 + torch.arange(tokens.shape[1], device=rows.device)
        self.tokens[rows[:, None], columns] = tokens.int()
        if accepted is not None:
            self.lengths[rows] = (written + accepted + 2).int()

    def look_up(self, sources: Sources, further: int, out: torch.Tensor) -> None:
        """Write proposals to `out` [n, B] for the tokens behind what is known of each request and
        `further` ones. Of the places where the longest text before it, of up to `LONGEST_MATCH`
        tokens, is that at the request's end, its own latest wins, then the latest of another. What
        followed is repeated if it is shorter than the proposals. Without a match: zeros."""
        out.zero_()
        for request, row in enumerate(sources.histories.tolist()):
            own = self.tokens[row, : int(self.lengths[row]) + further]
            best = (0, False, 0, 0)
            for rank, other in enumerate(sources.others[request].tolist()):
                if other < 0:
                    continue
                text = own if rank == 0 else self.tokens[other, : int(self.lengths[other])]
                first = 1 if rank == 0 else max(1, int(sources.prompts[request]))
                for place in range(first, len(text)):
                    length = _match(own, text[:place])
                    best = max(best, (length, rank == 0, place, rank))
            length, _, place, rank = best
            if length:
                other = int(sources.others[request, rank])
                text = own if rank == 0 else self.tokens[other, : int(self.lengths[other])]
                followed = text[place:].long()
                out[:, request] = followed.repeat(-(-len(out) // len(followed)))[: len(out)]

    def _to_device(self, values: Any) -> torch.Tensor:
        """`values` as int32, without a wait for the device."""
        host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
        if self.tokens.is_cuda:
            host = host.pin_memory()
        return host.to(self.tokens.device, non_blocking=True)


def _match(own: torch.Tensor, before: torch.Tensor) -> int:
    """How many of the latest tokens are the same, `LONGEST_MATCH` at most."""
    count = min(LONGEST_MATCH, len(own), len(before))
    same = (own.flip(0)[:count] == before.flip(0)[:count]).int()
    return int(same.cumprod(0).sum())
