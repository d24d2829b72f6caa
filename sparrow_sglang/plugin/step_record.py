"""Hidden states of the decode steps of some generations, and their comparison with dense ones.

In: hidden states of every forward pass, and SGLang's row of each request. Out: acceptance rates.
"""

from collections.abc import Callable, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from sparrow_sglang.mismatch.acceptance import acceptance_rate

if TYPE_CHECKING:
    import torch

_ROWS = 256

Place = tuple[int, int]
"""Slot, and the number of prompt tokens before the response."""


class StepRecord:
    """Last hidden states of decode steps, by slot and step; lives in a scheduler."""

    def __init__(
        self, slots: int, steps: int, rows: int, hidden_size: int, dtype: Any, device: Any
    ) -> None:
        """`rows` is the size of SGLang's token table."""
        import torch

        self._steps = steps
        self._nowhere = slots * steps
        # Not inference tensors: forward passes write them in inference mode, other writers do not.
        with torch.inference_mode(False):
            self._states = torch.zeros(slots * steps + 1, hidden_size, dtype=dtype, device=device)
            # Whether a state belongs to the generation that currently records into its slot.
            self._recorded = torch.zeros(slots * steps + 1, dtype=torch.bool, device=device)
            self._rates = torch.zeros(slots, steps, device=device)
            self._places = torch.full((rows, 2), -1, dtype=torch.int64, device=device)

    def assign(
        self, rows: Sequence[int], places: Sequence[Place | None], sampled: Sequence[int]
    ) -> None:
        """Set the slots that the requests in these rows of the token table record into.

        A place of None means that a request records nowhere. The requests are about to be
        prefilled; `sampled` are their numbers of response tokens so far, 0 unless retracted.
        """
        import torch

        index = torch.tensor(rows, device=self._places.device)
        values = torch.tensor([place or (-1, -1) for place in places], device=self._places.device)
        self._places[index] = values
        for place, step in zip(places, sampled, strict=True):
            if place is not None:
                start = place[0] * self._steps
                self._recorded[start + min(step, self._steps) : start + self._steps] = False

    def keep(self, hidden: "torch.Tensor", rows: "torch.Tensor", lengths: "torch.Tensor") -> None:
        """Record a decode step: hidden states [B, H] of requests with cached `lengths` [B].

        Reads and writes at fixed addresses, so that it can be part of a CUDA graph.
        """
        import torch

        slot, prompt = self._places[rows.long()].unbind(-1)
        step = lengths - prompt
        inside = (slot >= 0) & (step >= 0) & (step < self._steps)
        index = torch.where(inside, slot * self._steps + step, self._nowhere)
        self._states[index] = hidden
        self._recorded.index_fill_(0, index, True)

    def compare(
        self,
        hidden: "torch.Tensor",
        prefix: int,
        place: Place,
        logits: "Callable[[torch.Tensor], torch.Tensor]",
    ) -> list[float | None]:
        """Rates of response tokens 1 to T - 1 of one request, from its dense hidden states.

        `hidden` is [C, H], of the positions from `prefix` on; rates of earlier chunks are kept. A
        rate is None, as JSON has no NaN, where no decode step was recorded.
        """
        import torch

        slot, prompt = place
        end = prefix + len(hidden)
        last = min(end, prompt + self._steps - 1)
        for start in range(max(prefix, prompt), last, _ROWS):
            stop = min(start + _ROWS, last)
            # The dense state at position p predicts the token at p + 1, as does the decode step
            # with p + 1 cached tokens.
            step = start + 1 - prompt
            first = slot * self._steps + step
            kept = slice(first, first + stop - start)
            dense = hidden[start - prefix : stop - prefix]
            found = acceptance_rate(logits(self._states[kept]), logits(dense))
            found.masked_fill_(~self._recorded[kept], torch.nan)
            self._rates[slot, step : step + len(found)] = found
        rates = self._rates[slot, 1 : max(1, end - prompt)].tolist()
        return [None if isnan(rate) else rate for rate in rates]
