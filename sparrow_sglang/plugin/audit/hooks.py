"""What SGLang does otherwise for the audit: requests and answers are seen, scores are held back.

Does nothing in a process that serves without --sparrow-audit-rate.
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
    """BEFORE hook: the last place where requests, one or a list, are objects of this process."""
    auditor = _auditor(manager)
    if auditor is not None:
        auditor.sees(requests if isinstance(requests, list) else [requests])


def see_answers(manager: "TokenizerManager", answers: Any) -> None:
    """BEFORE hook: answers before SGLang makes of them what the users asked for."""
    auditor = _auditor(manager)
    if auditor is not None and hasattr(answers, "output_ids"):
        auditor.receives(answers)


async def hold_back(call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: a call that needs the scheduler idle, or stops it, must meet no score there.

    Checked with 0.5.17. A pause that is not an abort keeps what the scheduler holds, so that an
    update would wait for its answer for ever; a flush fails while anything runs.
    """
    auditor = _auditor(manager)
    async with auditor.held_back() if auditor else nullcontext():
        return await call(manager, *args, **kwargs)


async def hold_back_for_new_weights(
    call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: as `hold_back`; what old weights generated must not be scored with new ones.

    Checked with 0.5.17, whose check of the weights may also overwrite them.
    """
    auditor = _auditor(manager)
    async with auditor.held_back_for_new_weights() if auditor else nullcontext():
        return await call(manager, *args, **kwargs)


async def hold_back_until_resumed(
    release: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: from the release of memory on, nothing may start until all of it is back.

    Checked with 0.5.17, whose scheduler asserts that it is idle, and where no tags mean all.
    """
    auditor = _auditor(manager)
    if auditor is None:
        return await release(manager, request, *args, **kwargs)
    async with auditor.held_back():
        answer = await release(manager, request, *args, **kwargs)
        auditor.released |= _tags(request)
    return answer


async def start_again(
    resume: Call, manager: "TokenizerManager", request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: the end of `hold_back_until_resumed`."""
    answer = await resume(manager, request, *args, **kwargs)
    auditor = _auditor(manager)
    if auditor is not None:
        auditor.released -= _tags(request)
    return answer


def _auditor(manager: "TokenizerManager") -> Auditor | None:
    state = server_state(manager)
    return None if state is None else state.auditor


def _tags(request: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(request.tags or GPU_MEMORY_ALL_TYPES)


def top_logprobs_of_some(
    original: Callable[..., tuple[list[Any], list[Any]]],
    logprobs: "torch.Tensor",
    top_logprobs_nums: list[int],
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """AROUND hook: search and copy only the rows [V] of `logprobs` [B, V] that want a top-k list.

    Checked with 0.5.17, which sorts every row if one of them wants it, and then copies two tensors
    per row to the host; for one audited request among 256 that is longer than the audit itself.
    The scheduler calls `tolist()` on what stands in for the other rows.
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
