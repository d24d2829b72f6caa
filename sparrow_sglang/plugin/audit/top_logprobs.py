"""Top-k lists of the requests that an audit records, as the scheduler computes them."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_sglang.plugin.audit.recorded import AUDITED
from sparrow_sglang.plugin.state import PROCESS, SchedulerState

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger("sparrow_sglang")


def remember_temperatures(
    forward_batch: "ForwardBatch", cls: type, batch: "ScheduleBatch", *args: Any, **kwargs: Any
) -> None:
    """AFTER hook: note at which temperatures the audited requests of a batch are sampled.

    SGLang samples a batch before it prepares another one, and does not divide logits by the
    temperature where all requests are greedy.
    """
    state = PROCESS.scheduler
    if state is None or not state.audited or not batch.return_logprob:
        return
    try:
        state.temperatures = _temperatures(forward_batch, batch)
    except Exception:
        _switch_off(state)


def _switch_off(state: SchedulerState) -> None:
    """An error of the audit must not end the scheduler."""
    state.audited, state.temperatures = False, {}
    logger.exception("the audit is off from now on, the server goes on; restart it to audit again")


def _temperatures(forward_batch: "ForwardBatch", batch: "ScheduleBatch") -> dict[int, float]:
    from sglang.srt.utils import get_bool_env_var

    original = get_bool_env_var("SGLANG_RETURN_ORIGINAL_LOGPROB")
    untempered = original or forward_batch.sampling_info.is_all_greedy
    return {
        row: req.sampling_params.temperature
        for row, req in enumerate(() if untempered else batch.reqs)
        if isinstance(parameters := req.sampling_params.custom_params, dict)
        and parameters.get(AUDITED) is True
    }


def top_logprobs_of_some(
    original: Callable[..., tuple[list[Any], list[Any]]],
    logprobs: "torch.Tensor",
    top_logprobs_nums: list[int],
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """AROUND hook: search and copy only the rows [V] of `logprobs` [B, V] that want a top-k list.

    SGLang sorts every row if one of them wants a list, and then copies two tensors per row to the
    host; for one audited request among 256 that takes longer than the audit itself. Audited rows at
    a temperature other than 1 get one entry more, see `add_normaliser`.
    """
    state = PROCESS.scheduler
    asking = [row for row, k in enumerate(top_logprobs_nums) if k > 0]
    if state is None or not state.audited or not asking or not no_copy_to_cpu:
        return original(logprobs, top_logprobs_nums, no_copy_to_cpu=no_copy_to_cpu)
    try:
        return _lists_of(original, logprobs, top_logprobs_nums, asking, state.temperatures)
    except Exception:
        _switch_off(state)
        return original(logprobs, top_logprobs_nums, no_copy_to_cpu=True)


def _lists_of(
    original: Callable[..., tuple[list[Any], list[Any]]],
    logprobs: "torch.Tensor",
    top_logprobs_nums: list[int],
    asking: list[int],
    temperatures: Mapping[int, float],
) -> tuple[list[Any], list[Any]]:
    import torch

    everybody = len(asking) == len(top_logprobs_nums)
    values, ids = original(
        logprobs if everybody else torch.stack([logprobs[row] for row in asking]),
        [top_logprobs_nums[row] for row in asking],
        no_copy_to_cpu=True,
    )
    # The scheduler calls `tolist()` on the entries.
    nothing: list[Any] = [np.empty(0)] * len(top_logprobs_nums)
    all_values, all_ids = nothing, list(nothing)
    for place, row in enumerate(asking):
        all_values[row], all_ids[row] = values[place], ids[place]
        if row in temperatures:
            all_values[row] = add_normaliser(values[place], logprobs[row], temperatures[row])
    return all_values, all_ids


def add_normaliser(
    values: "torch.Tensor", logprobs: "torch.Tensor", temperature: float
) -> "torch.Tensor":
    """`values` [k] and then the x that makes temperature * logprobs + x those at temperature 1.

    `logprobs` [V] are all log-probs at `temperature`: logits / temperature but for a constant.
    """
    import torch

    return torch.cat([values, -(logprobs * temperature).logsumexp(-1, keepdim=True)])
