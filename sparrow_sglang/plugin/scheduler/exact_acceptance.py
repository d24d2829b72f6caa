"""Exact acceptance rates of sparse generations, computed in the server that makes them. The
acceptance rate of a token needs the whole sparse and the whole dense distribution; top-k lists only
bound it. So the server keeps the last hidden state of every decode step of a generation, prefills
the same tokens again, densely, and compares the output layer's logits of both. Only the rates leave
the device. The requests for it are in `mismatch/exact_rates.py`. The cost is a copy of [batch,
hidden size] per decode step, and `record_bytes` of memory."""

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from typing import TYPE_CHECKING, Any

from sparrow_sglang.mismatch.acceptance import acceptance_rate
from sparrow_sglang.mismatch.exact_rates import (
    AUDIT_SLOTS,
    AUDIT_STEPS,
    COMPARE,
    RATES,
    RECORD,
    RECORD_VARIABLE,
)
from sparrow_sglang.plugin.state import PROCESS, SchedulerState, require_scheduler_state
from sparrow_sglang.sglang_compat.versions import kv_of, logits_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

_ROWS = 256

Recording = tuple[int, int]
"""Slot, and the number of prompt tokens before the response."""

logger = logging.getLogger("sparrow_sglang")


def record_size(server_args: "ServerArgs", model_config: "ModelConfig") -> tuple[int, int] | None:
    """Slots and steps per slot that a server records; None if it records nothing."""
    if server_args.sparrow_audit_rate > 0:
        return AUDIT_SLOTS, min(AUDIT_STEPS, model_config.context_len)
    if RECORD_VARIABLE not in os.environ:
        return None
    slots, steps = map(int, os.environ[RECORD_VARIABLE].split("x"))
    return slots, steps


def record_bytes(server_args: "ServerArgs", model_config: "ModelConfig") -> int:
    """Memory of the states that a server records."""
    slots, steps = record_size(server_args, model_config) or (0, 0)
    return slots * steps * model_config.hidden_size * model_config.dtype.itemsize


def assign_recordings(state: SchedulerState, batch: "ScheduleBatch") -> None:
    """Note which slots the requests of a prefill record into or are compared with."""
    model = batch.model_config
    with _guarded(state):
        _step_record(model.hidden_size, model.dtype).assign(
            [kv_of(req).req_pool_idx for req in batch.reqs],
            [_recording(req, RECORD) for req in batch.reqs],
            [len(req.output_ids) for req in batch.reqs],
        )
        # Not kept on `forward_batch`, as the pass is run with a copy of that.
        state.compared = [_recording(req, COMPARE) for req in batch.reqs]


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
    """AROUND hook: keep or compare last hidden states, where every forward pass has them. Decode
    passes run through here while their CUDA graph is captured, after warm-up passes;
    `customized_info` has one entry per request."""
    state = PROCESS.scheduler
    if state is not None and state.record is not None and batch.forward_mode.is_decode():
        with _guarded(state):
            record = _step_record(hidden_states.shape[1], hidden_states.dtype)
            record.keep(hidden_states, batch.req_pool_indices, batch.seq_lens)
    output = original(processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs)
    if state is not None and batch.forward_mode.is_extend() and any(state.compared):
        with _guarded(state):
            rates = _rates(state.compared, processor, hidden_states, lm_head, batch)
            output.customized_info = {**(output.customized_info or {}), RATES: rates}
    return output


def _rates(
    recordings: Sequence[Recording | None],
    processor: "LogitsProcessor",
    hidden_states: "torch.Tensor",
    lm_head: Any,
    batch: "ForwardBatch",
) -> list[list[float | None] | None]:
    from sglang.srt.layers.logits_processor import LogitsMetadata

    metadata = LogitsMetadata.from_forward_batch(batch)

    def logits(states: "torch.Tensor") -> "torch.Tensor":
        return logits_of(processor, states, lm_head, metadata)

    record = _step_record(hidden_states.shape[1], hidden_states.dtype)
    rates: list[list[float | None] | None] = []
    start = 0
    lengths = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
    for recording, (prefix, count) in zip(recordings, lengths, strict=True):
        part = hidden_states[start : start + count]
        rates.append(record.compare(part, prefix, recording, logits) if recording else None)
        start += count
    return rates


@contextmanager
def _guarded(state: SchedulerState) -> Iterator[None]:
    """An error of the record ends it, not the scheduler."""
    try:
        yield
    except Exception:
        state.record, state.compared = None, []
        logger.exception(
            "acceptance rates are off from now on, the server goes on; restart it to measure again"
        )


@functools.cache
def _step_record(hidden_size: int, dtype: Any) -> "StepRecord":
    state = require_scheduler_state()
    assert state.record is not None
    caps = state.budgets.tensors.caps
    return StepRecord(*state.record, len(caps), hidden_size, dtype, caps.device)


def _recording(request: Any, key: str) -> Recording | None:
    """The recording that a request names under `key`; None if this server has no such slot."""
    value = (request.sampling_params.custom_params or {}).get(key)
    if not isinstance(value, (list, tuple)) or [type(number) for number in value] != [int, int]:
        return None
    slot, prompt = value
    slots, _ = require_scheduler_state().record or (0, 0)
    exists = 0 <= slot < slots and 0 < prompt <= len(request.origin_input_ids)
    return (slot, prompt) if exists else None


class StepRecord:
    """Last hidden states of decode steps, by slot and step; lives in a scheduler."""

    def __init__(
        self, slots: int, steps: int, rows: int, hidden_size: int, dtype: Any, device: Any
    ) -> None:
        """`rows` is the size of SGLang's token table."""
        import torch

        # The last state of a slot takes all steps beyond.
        self._steps, self._stride = steps, steps + 1
        self._nowhere = slots * self._stride
        # Not inference tensors: forward passes write them in inference mode, other writers do not.
        with torch.inference_mode(False):
            states = self._nowhere + 1
            self._states = torch.zeros(states, hidden_size, dtype=dtype, device=device)
            # Whether a state belongs to the generation that currently records into its slot.
            self._recorded = torch.zeros(states, dtype=torch.bool, device=device)
            self._rates = torch.zeros(slots, steps, device=device)
            # A row's cached tokens plus the first number are the index of its state, between the
            # others.
            self._spans = torch.full((rows, 3), self._nowhere, device=device)

    def assign(
        self, rows: Sequence[int], recordings: Sequence[Recording | None], sampled: Sequence[int]
    ) -> None:
        """Set the slots that the requests in these rows of the token table record into; with None a
        request records nothing. The requests are about to be prefilled; `sampled` are their numbers
        of response tokens so far, 0 unless retracted."""
        import torch

        values = [[self._nowhere] * 3 for _ in rows]
        for row, (recording, step) in enumerate(zip(recordings, sampled, strict=True)):
            if recording is not None:
                slot, prompt = recording
                start, end = slot * self._stride, slot * self._stride + self._steps
                values[row] = [start - prompt, start, end]
                self._recorded[start + min(step, self._steps) : end] = False
        index = torch.tensor(rows, device=self._spans.device)
        self._spans[index] = torch.tensor(values, device=self._spans.device)

    def keep(self, hidden: "torch.Tensor", rows: "torch.Tensor", lengths: "torch.Tensor") -> None:
        """Record a decode step: hidden states [B, H] of requests with cached `lengths` [B]. All
        addresses are fixed, so that it can be part of a CUDA graph: five small kernels."""
        offset, first, last = self._spans.index_select(0, rows).unbind(-1)
        # Graphs pad with lengths below that of any prompt. No state at `first` is compared.
        index = (offset + lengths).clamp(first, last)
        self._states.index_copy_(0, index, hidden[: len(index)])
        self._recorded.index_fill_(0, index, True)

    def compare(
        self,
        hidden: "torch.Tensor",
        prefix: int,
        recording: Recording,
        logits: "Callable[[torch.Tensor], torch.Tensor]",
    ) -> list[float | None]:
        """Rates of response tokens 1 to T - 1 of one request, from its dense hidden states.
        `hidden` is [C, H], of the positions from `prefix` on; rates of earlier chunks are kept. A
        rate is None, as JSON has no NaN, where no decode step was recorded."""
        import torch

        slot, prompt = recording
        end = prefix + len(hidden)
        last = min(end, prompt + self._steps - 1)
        for start in range(max(prefix, prompt), last, _ROWS):
            stop = min(start + _ROWS, last)
            # The dense state at position p predicts the token at p + 1, as does the decode step
            # with p + 1 cached tokens.
            step = start + 1 - prompt
            first = slot * self._stride + step
            states = slice(first, first + stop - start)
            dense = hidden[start - prefix : stop - prefix]
            part = acceptance_rate(logits(self._states[states]), logits(dense))
            part.masked_fill_(~self._recorded[states], torch.nan)
            self._rates[slot, step : step + len(part)] = part
        rates = self._rates[slot, 1 : max(1, end - prompt)].tolist()
        return [None if isnan(rate) else rate for rate in rates]
