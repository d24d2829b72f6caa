"""Hooks for the audit: they observe requests and answers, and hold scores back.

They do nothing in a process that serves without --sparrow-audit-rate.
"""

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_sglang.plugin.audit.auditor import Auditor
from sparrow_sglang.plugin.state import PROCESS, server_state

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

Call = Callable[..., Coroutine[Any, Any, Any]]


def see_requests(manager: "TokenizerManager", requests: Any) -> None:
    """BEFORE hook: show the auditor a request, or a list of them, before it leaves this process."""
    auditor = _auditor(manager)
    if auditor is not None:
        auditor.sees(requests if isinstance(requests, list) else [requests])


def see_answers(manager: "TokenizerManager", answers: Any) -> None:
    """BEFORE hook: show the auditor answers before SGLang turns them into the users' answers."""
    auditor = _auditor(manager)
    if auditor is not None and hasattr(answers, "output_ids"):
        auditor.receives(answers)


async def hold_back(call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: no score may run during a call that needs the scheduler idle, or stops it.

    Checked with 0.5.17. A pause that is not an abort keeps the scheduler's requests, so a weight
    update would wait forever for a score to be answered; a flush fails while anything runs.
    """
    auditor = _auditor(manager)
    async with auditor.held_back() if auditor else nullcontext():
        return await call(manager, *args, **kwargs)


async def hold_back_for_new_weights(
    call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: as `hold_back`; responses of old weights must not be scored with new weights.

    Checked with 0.5.17, whose `check_weights` may also overwrite the weights.
    """
    auditor = _auditor(manager)
    async with auditor.held_back_for_new_weights() if auditor else nullcontext():
        return await call(manager, *args, **kwargs)


def _auditor(manager: "TokenizerManager") -> Auditor | None:
    state = server_state(manager)
    return None if state is None else state.auditor


def top_logprobs_of_some(
    original: Callable[..., tuple[list[Any], list[Any]]],
    logprobs: "torch.Tensor",
    top_logprobs_nums: list[int],
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """AROUND hook: search and copy only the rows [V] of `logprobs` [B, V] that want a top-k list.

    Checked with 0.5.17, which sorts every row if one of them wants a list, and then copies two
    tensors per row to the host; for one audited request among 256 that takes longer than the audit
    itself. The other rows get empty arrays, as the scheduler calls `tolist()` on them.
    """
    asking = [row for row, k in enumerate(top_logprobs_nums) if k > 0]
    everybody = len(asking) == len(top_logprobs_nums)
    audited = PROCESS.scheduler is not None and PROCESS.scheduler.audited
    if not audited or everybody or not no_copy_to_cpu:
        return original(logprobs, top_logprobs_nums, no_copy_to_cpu=no_copy_to_cpu)
    import torch

    values, ids = original(
        torch.stack([logprobs[row] for row in asking]),
        [top_logprobs_nums[row] for row in asking],
        no_copy_to_cpu=True,
    )
    nothing: list[Any] = [np.empty(0)] * len(top_logprobs_nums)
    all_values, all_ids = nothing, list(nothing)
    for place, row in enumerate(asking):
        all_values[row], all_ids[row] = values[place], ids[place]
    return all_values, all_ids
