"""Which requests an audit takes, and what it keeps of them until they are scored.

In: tokenised requests, and the scheduler's answers to them. Out: per audited request the tokens and
the log-probs that the sampler saw, within bounds of requests and tokens.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sparrow_sglang.client.scoring import SparseScores
from sparrow_sglang.requests import RequestOption
from sparrow_sglang.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, TokenizedGenerateReqInput

MAX_REQUESTS = 64
"""So many requests are recorded at once, and so many recorded ones wait for their score."""

MAX_TOKENS = 1 << 20
"""Tokens, of prompts and of responses, that all of them hold together.

A token of a response takes 8 bytes and 8 more per entry of its top-k list, 168 at k = 20, and an
array up to an eighth more than it holds: 200 MB in the worst case, whatever the requests' lengths.
"""

_ALL_TOP_K = 1 << 30


@dataclass
class RecordedRequest:
    """A request of `prompt` that is being generated or was, and what the sampler saw of it.

    Of T response tokens `top_ids` and `top_logprobs` hold T * `top_k` entries, most likely first.
    `lost` means that it will not be scored: the weights or the schedule have changed since it
    began, or there was no room for it.
    """

    request_id: str
    prompt: "array[int]"
    lora_path: str | None
    lora_id: str | None
    user_top_k: int
    top_k: int
    lost: bool = False
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    top_ids: "array[int]" = field(default_factory=lambda: array("i"))
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt and of the response so far; 0 once it is lost."""
        return len(self.prompt) + len(self.tokens)

    def record(self, answers: "BatchStrOutput", index: int) -> None:
        """Take what the sampler saw."""
        self.logprobs.extend(answers.output_token_logprobs_val[index])
        self.tokens.extend(answers.output_token_logprobs_idx[index])
        for mine, rows in (
            (self.top_logprobs, answers.output_top_logprobs_val[index]),
            (self.top_ids, answers.output_top_logprobs_idx[index]),
        ):
            for row in rows:
                mine.extend(row[: self.top_k])

    def leave_to_user(self, answers: "BatchStrOutput", index: int) -> None:
        """Cut the answer's top-k lists to what the user asked for."""
        for lists in (answers.output_top_logprobs_val, answers.output_top_logprobs_idx):
            lists[index] = [row[: self.user_top_k] for row in lists[index]]

    def lose(self) -> None:
        """Free what was recorded and record no more."""
        self.lost = True
        for held in (self.prompt, self.tokens, self.logprobs, self.top_ids, self.top_logprobs):
            del held[:]

    def scores(self, tokens: int) -> SparseScores:
        """What the sampler saw of the first `tokens` tokens of the response."""
        entries = tokens * self.top_k
        return SparseScores(
            logprobs=np.array(self.logprobs[:tokens], dtype=np.float64),
            top_ids=np.array(self.top_ids[:entries], dtype=np.int64).reshape(tokens, -1),
            top_logprobs=np.array(self.top_logprobs[:entries], dtype=np.float64).reshape(
                tokens, -1
            ),
        )


class AuditQueue:
    """Requests that are being recorded, and recorded ones that wait for their score.

    What does not fit into MAX_REQUESTS or MAX_TOKENS counts as dropped in `outcomes`.
    """

    def __init__(self, outcomes: Counter[str]) -> None:
        self._outcomes = outcomes
        self._recording: dict[str, RecordedRequest] = {}
        self._waiting: deque[RecordedRequest] = deque()
        self._scoring: RecordedRequest | None = None
        self._tokens = 0

    @property
    def first(self) -> RecordedRequest | None:
        """The request that is to be scored next."""
        return self._waiting[0] if self._waiting else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded, waits or is scored."""
        return not (self._recording or self._waiting or self._scoring)

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
        """Record one answer of a request, and leave in it what the user asked for.

        Does nothing for a request that is not recorded.
        """
        request = self._recording.get(request_id)
        if request is None:
            return
        if not request.lost:
            self._tokens -= request.held_tokens
            try:
                request.record(answers, index)
            except TypeError:
                # A log-prob that is no number must not keep the answer from its user.
                request.lose()
            self._tokens += request.held_tokens
            if self._tokens > MAX_TOKENS:
                self._lose(request)
        request.leave_to_user(answers, index)

    def finish(self, request_id: str, complete: bool) -> None:
        """The request is over; if `complete` and not lost, it waits for its score from now on."""
        request = self._recording.pop(request_id, None)
        if request is None:
            return
        full = len(self._waiting) == MAX_REQUESTS
        if request.lost or full or not complete or not request.tokens:
            self._drop(request)
        else:
            self._waiting.append(request)

    def take(self) -> RecordedRequest:
        """Remove `first`, which counts as scored until `done` or `put_back`."""
        self._scoring = self._waiting.popleft()
        return self._scoring

    def put_back(self) -> None:
        """The request that was taken has not been scored, and is to be scored next."""
        if self._scoring is not None:
            self._waiting.appendleft(self._scoring)
        self._scoring = None

    def done(self) -> None:
        """The request that was taken needs nothing any more."""
        if self._scoring is not None:
            self._tokens -= self._scoring.held_tokens
        self._scoring = None

    def clear(self) -> None:
        """Nothing that has begun so far shall be scored: weights or schedule change."""
        for request in self._recording.values():
            self._lose(request)
        while self._waiting:
            self._drop(self._waiting.popleft())
        if self._scoring is not None:
            # Its arrays may be in use in another thread.
            self._scoring.lost = True

    def _lose(self, request: RecordedRequest) -> None:
        self._tokens -= request.held_tokens
        request.lose()

    def _drop(self, request: RecordedRequest) -> None:
        self._outcomes["dropped"] += 1
        self._lose(request)


def is_auditable(
    request: "TokenizedGenerateReqInput", option: RequestOption | None, active: BudgetSchedule
) -> bool:
    """Whether the sampler sees the model's own distribution, of the active schedule."""
    parameters = request.sampling_params
    reshaped = (
        parameters.min_p,
        parameters.frequency_penalty,
        parameters.presence_penalty,
        parameters.min_new_tokens,
        parameters.logit_bias,
        parameters.json_schema,
        parameters.regex,
        parameters.ebnf,
        parameters.structural_tag,
        request.custom_logit_processor,
        option is None or option.schedule != active or option.kv_budget_tokens is not None,
    )
    plain = (
        parameters.temperature == 1.0
        and parameters.top_p == 1.0
        and parameters.top_k in (-1, _ALL_TOP_K)
        and parameters.repetition_penalty == 1.0
        and not any(reshaped)
    )
    # Log-probs of the prompt would come back for as many tokens as the audit asks for.
    prompt_logprobs = request.return_logprob and request.logprob_start_len != -1
    other_input = (
        request.input_embeds is not None
        or request.mm_inputs is not None
        or request.session_params is not None
        or request.positional_embed_overrides is not None
    )
    return plain and not prompt_logprobs and not other_input and bool(request.input_ids)


def ask_for_logprobs(request: "TokenizedGenerateReqInput", top_k: int) -> None:
    """Have the scheduler return the sampled tokens' log-probs and top-k lists.

    Fields that SGLang ignores as long as no log-probs are asked for must not come to life by this:
    the prompt's log-probs would cost a forward pass over what the prefix cache holds.
    """
    if not request.return_logprob:
        request.top_logprobs_num = 0
        request.logprob_start_len = -1
        request.token_ids_logprob = None
    request.top_logprobs_num = max(top_k, request.top_logprobs_num)
    request.return_logprob = True
