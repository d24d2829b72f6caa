"""Exact acceptance rates of sparse generations, computed in the server that makes them.

The acceptance rate of a token needs the whole sparse and the whole dense distribution; top-k lists
only bound it. So the server keeps the last hidden state of every decode step of a generation,
prefills the same tokens again, densely, and compares the output layer's logits of both. Only the
rates leave the device. The requests for it are in `mismatch/exact_rates.py`.

The cost is a copy of [batch, hidden size] per decode step, and slots x steps x hidden size numbers.
"""

import functools
import os
from collections.abc import Callable, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from sparrow_sglang.mismatch.acceptance import acceptance_rate
from sparrow_sglang.mismatch.exact_rates import COMPARE, RATES, RECORD, VARIABLE
from sparrow_sglang.plugin.state import PROCESS, require_scheduler_state
from sparrow_sglang.sglang_versions import kv_of, logits_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_ROWS = 256

Place = tuple[int, int]
"""Slot, and the number of prompt tokens before the response."""


def remember_places(
    forward_batch: "ForwardBatch", cls: type, batch: "ScheduleBatch", *args: Any, **kwargs: Any
) -> None:
    """AFTER hook: note which slots the requests of a prefill record into or are compared with."""
    if not _records() or not forward_batch.forward_mode.is_extend():
        return
    model = batch.model_config
    _the_record(model.hidden_size, model.dtype).assign(
        [kv_of(req).req_pool_idx for req in batch.reqs],
        [_place(req, RECORD) for req in batch.reqs],
        [len(req.output_ids) for req in batch.reqs],
    )
    # Kept by request id, not on `forward_batch`, as the pass is run with a copy of that.
    places = {req.rid: _place(req, COMPARE) for req in batch.reqs}
    require_scheduler_state().compared = {
        rid: place for rid, place in places.items() if place is not None
    }


def keep_or_compare(
    original: "Callable[..., LogitsProcessorOutput]",
    processor: "LogitsProcessor",
    input_ids: "torch.Tensor",
    hidden_states: "torch.Tensor",
    lm_head: Any,
    batch: "ForwardBatch",
    *args: Any,
    **kwargs: Any,
) -> "LogitsProcessorOutput":
    """AROUND hook: keep or compare last hidden states, where every forward pass has them.

    Decode passes run through here while their CUDA graph is captured, after warm-up passes;
    `customized_info` has one entry per request.
    """
    if not _records():
        return original(processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs)
    record = _the_record(hidden_states.shape[1], hidden_states.dtype)
    if batch.forward_mode.is_decode():
        record.keep(hidden_states, batch.req_pool_indices, batch.seq_lens)
    output = original(processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs)
    compared = require_scheduler_state().compared
    if batch.forward_mode.is_extend() and compared:
        from sglang.srt.layers.logits_processor import LogitsMetadata

        metadata = LogitsMetadata.from_forward_batch(batch)

        def logits(states: "torch.Tensor") -> "torch.Tensor":
            return logits_of(processor, states, lm_head, metadata)

        rates: list[list[float | None] | None] = []
        start = 0
        lengths = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        for rid, (prefix, count) in zip(batch.rids, lengths, strict=True):
            place = compared.get(rid)
            part = hidden_states[start : start + count]
            rates.append(record.compare(part, prefix, place, logits) if place else None)
            start += count
        output.customized_info = {**(output.customized_info or {}), RATES: rates}
    return output


def _records() -> bool:
    # Engines with other attention backends may inherit the environment variable, too.
    return VARIABLE in os.environ and PROCESS.scheduler is not None


@functools.cache
def _the_record(hidden_size: int, dtype: Any) -> "StepRecord":
    caps = require_scheduler_state().budgets.tensors.caps
    return StepRecord(*_size(), len(caps), hidden_size, dtype, caps.device)


def _place(request: Any, key: str) -> Place | None:
    """The place that a request gives under `key`; None if it gives none that this server has."""
    given = (request.sampling_params.custom_params or {}).get(key)
    if not isinstance(given, (list, tuple)) or [type(number) for number in given] != [int, int]:
        return None
    slot, prompt = given
    inside = 0 <= slot < _size()[0] and 0 < prompt <= len(request.origin_input_ids)
    return (slot, prompt) if inside else None


def _size() -> tuple[int, int]:
    """Numbers of slots and of steps per slot."""
    slots, steps = map(int, os.environ[VARIABLE].split("x"))
    return slots, steps


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
