"""Exact acceptance rates of sparse generations, computed in the server that makes them.

The acceptance rate of a token needs the whole sparse and the whole dense distribution. Top-k lists
bound it, which is enough for a model with peaked distributions; where a model spreads its
probability over thousands of tokens, the bounds are too loose to be of use. So the server keeps the
last hidden state of every decode step of a generation, prefills the same tokens again, densely, and
compares the output layer's logits of both. Only the rates leave the device. The requests for it are
in `mismatch/exact_rates.py`.

The cost is one copy of [batch, hidden size] per decode step, captured in its CUDA graph, and memory
for slots x steps x hidden size numbers.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparrow_sglang.mismatch.exact_rates import COMPARE, RATES, RECORD, VARIABLE
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
    """AFTER hook: note which slots the requests of a prefill record into or are compared with.

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

    Checked with 0.5.17, where decode passes run through here while their CUDA graph is captured,
    after warm-up passes, and `customized_info` has one entry per request.
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
    # Engines with other attention backends may inherit the environment variable, too.
    return VARIABLE in os.environ and PROCESS.scheduler is not None


def _the_record(hidden_size: int, dtype: Any, device: Any) -> StepRecord:
    state = require_scheduler_state()
    if state.record is None:
        slots, steps = _size()
        rows = state.budgets.tensors.options.shape[0]
        state.record = StepRecord(slots, steps, rows, hidden_size, dtype, device)
    return state.record


def _place(request: Any, key: str) -> Place | None:
    """The place that a request gives under `key`; None if it gives none.

    Also None if this server has no such place, as a client's mistake must not end the server.
    """
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
