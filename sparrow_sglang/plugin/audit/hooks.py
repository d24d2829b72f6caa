"""Where SGLang is changed for the audit, in the form of hooks of its plugin framework.

They do nothing in a process that serves without --sparrow-audit-rate.
"""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_sglang.plugin.audit.auditor import Auditor
from sparrow_sglang.plugin.audit.mismatch_log import MismatchLog
from sparrow_sglang.plugin.refusals import uses_sparrow
from sparrow_sglang.plugin.scheduler_hooks import Hook
from sparrow_sglang.plugin.server_args import resolve_schedule

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

Call = Callable[..., Coroutine[Any, Any, Any]]

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ATTRIBUTE = "sparrow_auditor"


class _Scheduler:
    """Whether this process schedules audited requests."""

    audited = False


def audit_here(
    scheduler: "Scheduler", server_args: "ServerArgs", *args: Any, **kwargs: Any
) -> None:
    """BEFORE hook: remember in a scheduler that its server is audited."""
    _Scheduler.audited = uses_sparrow(server_args) and server_args.sparrow_audit_rate > 0


def offer_audit(result: None, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> None:
    """AFTER hook: an auditor for the process that sees every request and every answer.

    Checked with 0.5.17. `sparrow_audit` is what `Endpoint.call_sparrow("audit")` calls.
    """
    server_args = manager.server_args
    rate = server_args.sparrow_audit_rate
    if not uses_sparrow(server_args) or not rate:
        return
    folder = server_args.sparrow_audit_log
    schedule, _ = resolve_schedule(server_args, manager.model_config.hf_config)
    auditor = Auditor(manager, rate, schedule, MismatchLog(Path(folder)) if folder else None)
    setattr(manager, _ATTRIBUTE, auditor)
    manager.sparrow_audit = auditor.finish


def see_request(manager: "TokenizerManager", request: Any) -> None:
    """BEFORE hook: the last place where a request is still a tokenised object of this process."""
    auditor = _auditor(manager)
    if auditor is not None:
        auditor.sees([request])


def see_requests(manager: "TokenizerManager", requests: list[Any]) -> None:
    """BEFORE hook: as `see_request`, for a batch that is tokenised together."""
    auditor = _auditor(manager)
    if auditor is not None:
        auditor.sees(requests)


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
    if auditor is None:
        return await call(manager, *args, **kwargs)
    async with auditor.held_back():
        return await call(manager, *args, **kwargs)


async def hold_back_for_new_weights(
    call: Call, manager: "TokenizerManager", *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: as `hold_back`; what old weights generated must not be scored with new ones.

    Checked with 0.5.17, whose check of the weights may also overwrite them.
    """
    auditor = _auditor(manager)
    if auditor is None:
        return await call(manager, *args, **kwargs)
    async with auditor.held_back_for_new_weights():
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
    auditor: Auditor | None = getattr(manager, _ATTRIBUTE, None)
    return auditor


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
    wanted = [row for row, k in enumerate(top_logprobs_nums) if k > 0]
    everybody = len(wanted) == len(top_logprobs_nums)
    if not _Scheduler.audited or everybody or not no_copy_to_cpu:
        return original(logprobs, top_logprobs_nums, no_copy_to_cpu=no_copy_to_cpu)
    import torch

    values, ids = original(
        torch.stack([logprobs[row] for row in wanted]),
        [top_logprobs_nums[row] for row in wanted],
        no_copy_to_cpu=True,
    )
    nothing: list[Any] = [np.empty(0)] * len(top_logprobs_nums)
    all_values, all_ids = nothing, list(nothing)
    for place, row in enumerate(wanted):
        all_values[row], all_ids[row] = values[place], ids[place]
    return all_values, all_ids


HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", audit_here, "BEFORE"),
    Hook(f"{_MANAGER}.__init__", offer_audit, "AFTER"),
    Hook(f"{_MANAGER}._send_one_request", see_request, "BEFORE"),
    Hook(f"{_MANAGER}._send_batch_request", see_requests, "BEFORE"),
    Hook(f"{_MANAGER}._handle_batch_output", see_answers, "BEFORE"),
    *(
        Hook(f"{_MANAGER}.{call}", hold_back, "AROUND")
        for call in ("pause_generation", "flush_cache")
    ),
    *(
        Hook(f"{_MANAGER}.{call}", hold_back_for_new_weights, "AROUND")
        for call in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "check_weights",
        )
    ),
    Hook(f"{_MANAGER}.release_memory_occupation", hold_back_until_resumed, "AROUND"),
    Hook(f"{_MANAGER}.resume_memory_occupation", start_again, "AROUND"),
    Hook("sglang.srt.layers.logprob_processor.get_top_logprobs", top_logprobs_of_some, "AROUND"),
)
