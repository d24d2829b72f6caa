"""Requests that are being audited: which are eligible, and what is kept until they are scored."""

from array import array
from collections import Counter, deque
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparrow_sglang.mismatch.exact_rates import AUDIT_SLOTS, COMPARE, RECORD, record_into
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, TokenizedGenerateReqInput

_OTHER_INPUT = ("input_embeds", "mm_inputs", "session_params", "positional_embed_overrides")


@dataclass
class RecordedRequest:
    """An audited request, running or finished; its decode steps are recorded in `slot`. `dp_rank`
    is the replica that serves it. A `cleared` request will not be scored."""

    request_id: str
    prompt: "array[int]"
    lora_path: str | None
    lora_id: str | None
    slot: int
    dp_rank: int | None = None
    cleared: bool = False
    tokens: "array[int]" = field(default_factory=lambda: array("i"))


class AuditQueue:
    """Requests that are being recorded, and recorded ones that wait for their score. Each holds a
    slot from its start until it is scored or dropped. Requests for which no slot is free, or that
    are cleared, count as dropped in `outcomes`."""

    def __init__(self, outcomes: Counter[str]) -> None:
        self._outcomes = outcomes
        self._free = list(range(AUDIT_SLOTS))
        self._recording: dict[str, RecordedRequest] = {}
        self._waiting: deque[RecordedRequest] = deque()

    @property
    def first(self) -> RecordedRequest | None:
        return self._waiting[0] if self._waiting else None

    def start(self, request: "TokenizedGenerateReqInput", lora_path: str | None) -> None:
        """Have the scheduler record `request`, if a slot is free."""
        if not self._free:
            self._outcomes["dropped"] += 1
            return
        prompt, slot = array("i", request.input_ids), self._free.pop()
        recorded = RecordedRequest(request.rid, prompt, lora_path, request.lora_id, slot)
        self._recording[request.rid] = recorded
        _set_custom_params(request, record_into(slot, len(prompt)))

    def record(self, request_id: str, outputs: "BatchStrOutput", index: int) -> None:
        """Append the tokens of one of the scheduler's outputs, if the request is recorded."""
        request = self._recording.get(request_id)
        if request is not None and outputs.output_ids is not None:
            request.tokens.extend(list(outputs.output_ids[index] or ()))
            request.dp_rank = outputs.dp_ranks[index] if outputs.dp_ranks else None

    def finish(self, request_id: str, complete: bool) -> None:
        """End the recording of a request; if `complete` and not cleared, queue it for its score."""
        request = self._recording.pop(request_id, None)
        if request is None:
            return
        if request.cleared or not complete or not request.tokens:
            self._drop(request)
        else:
            self._waiting.append(request)

    def take_first(self) -> RecordedRequest:
        """Remove and return the first request, which the caller scores and then frees."""
        return self._waiting.popleft()

    def free(self, request: RecordedRequest) -> None:
        """Give the slot of a request to others."""
        self._free.append(request.slot)

    def clear(self) -> None:
        """Drop all requests that have begun so far, as the weights or the schedule change. Running
        ones keep their slots until they end, as their steps are still recorded."""
        for request in self._recording.values():
            request.cleared = True
        while self._waiting:
            self._drop(self._waiting.popleft())

    def _drop(self, request: RecordedRequest) -> None:
        self._outcomes["dropped"] += 1
        self.free(request)


def remove_slots(request: "TokenizedGenerateReqInput") -> None:
    """Remove slots that a user's request names, as all belong to the audit."""
    params = request.sampling_params.custom_params
    if isinstance(params, dict) and (RECORD in params or COMPARE in params):
        _set_custom_params(request, {RECORD: None, COMPARE: None})


def _set_custom_params(request: "TokenizedGenerateReqInput", params: dict[str, Any]) -> None:
    # Copies, as the samples of one request share their parameters, and the user's own request
    # object, from which SGLang builds the answer, stays as it is.
    request.sampling_params = copy(request.sampling_params)
    old = request.sampling_params.custom_params or {}
    request.sampling_params.custom_params = {**old, **params}


def skip_reason(
    request: "TokenizedGenerateReqInput", option: RequestOption | None, active: BudgetSchedule
) -> str | None:
    """Why a request cannot be audited, one of `statistics.SKIPPED`; None if it can. The rates
    compare the model's own distributions along whatever was sampled, so that sampling parameters,
    penalties, grammars do not matter."""
    if active.is_dense:
        return "dense"
    if option is None or option.schedule != active or option.kv_budget_tokens is not None:
        return "own_schedule"
    if (
        not request.input_ids
        or not isinstance(request.sampling_params.custom_params, dict | None)
        or any(getattr(request, name) is not None for name in _OTHER_INPUT)
    ):
        return "input"
    return None
