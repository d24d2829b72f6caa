"""Exact acceptance rates of sparse generations, computed in the server that makes them.

The rate of a token needs both whole distributions. Lists of the likeliest tokens bound it, which is
enough for a model that is sure of itself; where a model spreads its probability over thousands of
tokens, the bounds say nothing. So the server keeps the last hidden state of every decode step of a
generation, prefills the same tokens again, densely, and compares what the output layer makes of
both. Only the rates leave the device. `client/exact_rates.py` has the requests for it.

Costs one copy of [batch, hidden size] per decode step, captured in its CUDA graph, and slots x
steps x hidden size numbers of memory.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparrow_sglang.client.exact_rates import COMPARE, RATES, RECORD, VARIABLE
from sparrow_sglang.plugin.state import PROCESS, require_scheduler_state
from sparrow_sglang.plugin.step_record import Place, StepRecord
from sparrow_sglang.sglang_versions import kv_of, logits_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def remember_places(
    forward_batch: "ForwardBatch", cls: type, batch: "ScheduleBatch", *args: Any, **kwargs: Any
) -> None:
    """AFTER hook: which slots the requests of a prefill record into or are compared with.

    Checked with 0.5.17; see `scheduler_hooks.remember_options`.
    """
    if not _records() or not forward_batch.forward_mode.is_extend():
        return
    model = batch.model_config
    _the_record(model.hidden_size, model.dtype, batch.device).assign(
        [kv_of(req).req_pool_idx for req in batch.reqs],
        [_place(req, RECORD) for req in batch.reqs],
        [len(req.output_ids) for req in batch.reqs],
    )
    # By id, as the pass is run with a copy of `forward_batch`.
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
    """AROUND hook: the one place that sees the last hidden states of every forward pass.

    Checked with 0.5.17, where decode passes run through here while their CUDA graph is captured,
    after passes to warm up, and `customized_info` has one entry per request.
    """
    if not _records():
        return original(processor, input_ids, hidden_states, lm_head, batch, *args, **kwargs)
    record = _the_record(hidden_states.shape[1], hidden_states.dtype, hidden_states.device)
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
    # An environment may reach engines of other attention backends, too.
    return VARIABLE in os.environ and PROCESS.scheduler is not None


def _the_record(hidden_size: int, dtype: Any, device: Any) -> StepRecord:
    state = require_scheduler_state()
    if state.record is None:
        slots, steps = _size()
        rows = state.budgets.tensors.options.shape[0]
        state.record = StepRecord(slots, steps, rows, hidden_size, dtype, device)
    return state.record


def _place(request: Any, key: str) -> Place | None:
    """None also where a client gives no place that this server has, which must not end it."""
    given = (request.sampling_params.custom_params or {}).get(key)
    if not isinstance(given, (list, tuple)) or [type(number) for number in given] != [int, int]:
        return None
    slot, prompt = given
    inside = 0 <= slot < _size()[0] and 0 < prompt <= len(request.origin_input_ids)
    return (slot, prompt) if inside else None


def _size() -> tuple[int, int]:
    """Slots and steps."""
    slots, steps = map(int, os.environ[VARIABLE].split("x"))
    return slots, steps
