"""Which requests an audit takes, and what it keeps of them until they are scored."""

from array import array
from collections import Counter, deque
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sparrow_sglang.mismatch.scores import SparseScores
from sparrow_sglang.request_options import RequestOption
from sparrow_sglang.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, TokenizedGenerateReqInput

MAX_REQUESTS = 64
"""Largest number of requests recorded at once, and of recorded requests waiting for a score."""

MAX_TOKENS = 1 << 20
"""Largest number of prompt and response tokens that all these requests hold together.

A response token takes 8 bytes and 8 more per entry of its top-k list: at most 200 MB at k = 20.
"""

MIN_TEMPERATURE = 0.25
"""Lowest temperature from whose log-probs in fp32 those at temperature 1 can be had."""
AUDITED = "sparrow_audited"
"""Name in `custom_params` of an audited request whose temperature is not 1; its value is True."""
_PENALTIES = ("frequency_penalty", "presence_penalty", "min_new_tokens", "logit_bias")
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_OTHER_INPUT = ("input_embeds", "mm_inputs", "session_params", "positional_embed_overrides")


@dataclass
class RecordedRequest:
    """An audited request, running or finished, and what the sampler saw of its response.

    For T response tokens `top_ids` and `top_logprobs` hold T * `top_k` entries, most likely first.
    All log-probs are at temperature 1. A `lost` request will not be scored.
    """

    request_id: str
    prompt: "array[int]"
    lora_path: str | None
    lora_id: str | None
    user_top_k: int
    top_k: int
    temperature: float = 1.0
    lost: bool = False
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    top_ids: "array[int]" = field(default_factory=lambda: array("i"))
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    @property
    def held_tokens(self) -> int:
        """Tokens of prompt and response; 0 after `lose`."""
        return len(self.prompt) + len(self.tokens)

    def record(self, answers: "BatchStrOutput", index: int) -> None:
        """Append the tokens and log-probs of one of the scheduler's answers."""
        sampled = answers.output_token_logprobs_val[index]
        lists = answers.output_top_logprobs_val[index]
        self.tokens.extend(answers.output_token_logprobs_idx[index])
        for ids in answers.output_top_logprobs_idx[index]:
            self.top_ids.extend(ids[: self.top_k])
        asked = max(self.top_k, self.user_top_k)
        for logprob, values in zip(sampled, lists, strict=True):
            scale, shift = 1.0, 0.0
            if len(values) > asked:
                # See `top_logprobs.add_normaliser`.
                scale, shift = self.temperature, values[asked]
            self.logprobs.append(scale * logprob + shift)
            self.top_logprobs.extend(scale * value + shift for value in values[: self.top_k])

    def lose(self) -> None:
        """Free what was recorded and record no more."""
        self.lost = True
        # New arrays, as a thread may be reading the old ones.
        self.prompt, self.tokens, self.top_ids = array("i"), array("i"), array("i")
        self.logprobs, self.top_logprobs = array("f"), array("f")

    def scores(self, tokens: int) -> SparseScores:
        """The sampler's log-probs and top-k lists of the first `tokens` response tokens."""
        entries, lists = tokens * self.top_k, (tokens, self.top_k)
        return SparseScores(
            logprobs=np.array(self.logprobs[:tokens], np.float64),
            top_ids=np.array(self.top_ids[:entries], np.int64).reshape(lists),
            top_logprobs=np.array(self.top_logprobs[:entries], np.float64).reshape(lists),
        )


class AuditQueue:
    """Requests that are being recorded, and recorded ones that wait for their score.

    Requests that do not fit, or are cleared, count as dropped in `outcomes`.
    """

    def __init__(self, outcomes: Counter[str]) -> None:
        self._outcomes = outcomes
        self._recording: dict[str, RecordedRequest] = {}
        self._waiting: deque[RecordedRequest] = deque()
        self._tokens = 0

    @property
    def first(self) -> RecordedRequest | None:
        return self._waiting[0] if self._waiting else None

    def start(self, request: RecordedRequest) -> bool:
        """Record `request` from now on, if there is room; returns whether there is."""
        tokens = self._tokens + request.held_tokens
        if len(self._recording) == MAX_REQUESTS or tokens > MAX_TOKENS:
            self._outcomes["dropped"] += 1
            return False
        self._recording[request.request_id] = request
        self._tokens = tokens
        return True

    def record(self, request_id: str, answers: "BatchStrOutput", index: int) -> None:
        """Record one answer of a recorded request; leave in it what the user requested."""
        request = self._recording.get(request_id)
        if request is None:
            return
        if not request.lost:
            self._tokens -= request.held_tokens
            try:
                request.record(answers, index)
            except (TypeError, ValueError, LookupError):
                # An answer without lists, as that to a prompt that is too long, or a log-prob that
                # is no number; the user must get the answer anyway.
                request.lose()
            self._tokens += request.held_tokens
            if self._tokens > MAX_TOKENS:
                self._lose(request)
        for lists in (answers.output_top_logprobs_val, answers.output_top_logprobs_idx):
            if lists and lists[index]:
                lists[index] = [row[: request.user_top_k] for row in lists[index]]

    def finish(self, request_id: str, complete: bool) -> None:
        """End the recording of a request; if `complete` and not lost, queue it for its score."""
        request = self._recording.pop(request_id, None)
        if request is None:
            return
        full = len(self._waiting) == MAX_REQUESTS
        if request.lost or full or not complete or not request.tokens:
            self._outcomes["dropped"] += 1
            self._lose(request)
        else:
            self._waiting.append(request)

    def take_first(self) -> RecordedRequest:
        """Remove the first request, which is to be scored now."""
        request = self._waiting.popleft()
        self._tokens -= request.held_tokens
        return request

    def clear(self) -> None:
        """Drop all requests that have begun so far, as the weights or the schedule change."""
        for request in (*self._recording.values(), *self._waiting):
            self._lose(request)
        self._outcomes["dropped"] += len(self._waiting)
        self._waiting.clear()

    def _lose(self, request: RecordedRequest) -> None:
        self._tokens -= request.held_tokens
        request.lose()


def skip_reason(
    request: "TokenizedGenerateReqInput",
    option: RequestOption | None,
    active: BudgetSchedule,
    strict_thinking: bool,
) -> str | None:
    """Why a request cannot be audited, one of `statistics.SKIPPED`; None if it can.

    The rates compare whole distributions along whatever was sampled, so top-p, top-k, min-p and
    temperature do not matter. Log-probs of masked or penalised logits are not the model's own.

    `strict_thinking` says that the server itself masks logits, with --enable-strict-thinking.
    """
    parameters = request.sampling_params
    if (
        strict_thinking
        or parameters.repetition_penalty != 1.0
        or request.custom_logit_processor
        or any(getattr(parameters, name) for name in _PENALTIES + _GRAMMARS)
    ):
        return "masked_logits"
    if active.is_dense:
        return "dense"
    if option is None or option.schedule != active or option.kv_budget_tokens is not None:
        return "own_schedule"
    if parameters.temperature < MIN_TEMPERATURE:
        return "low_temperature"
    # The prompt's top-k lists would be as long as those that the audit asks for.
    if request.return_logprob and request.logprob_start_len != -1:
        return "prompt_logprobs"
    if (
        not request.input_ids
        or not isinstance(parameters.custom_params, dict | None)
        or any(getattr(request, name) is not None for name in _OTHER_INPUT)
    ):
        return "input"
    return None


def ask_for_logprobs(request: "TokenizedGenerateReqInput", top_k: int) -> None:
    """Have the scheduler return the sampled tokens' log-probs and top-k lists."""
    if not request.return_logprob:
        # Ignored until now: log-probs of the prompt would cost a pass over its cached prefix.
        request.top_logprobs_num = 0
        request.logprob_start_len = -1
        request.token_ids_logprob = None
    request.top_logprobs_num = max(top_k, request.top_logprobs_num)
    request.return_logprob = True
    if request.sampling_params.temperature != 1.0:
        # A copy, as the samples of one request share their parameters.
        parameters = request.sampling_params = copy(request.sampling_params)
        parameters.custom_params = {**(parameters.custom_params or {}), AUDITED: True}
