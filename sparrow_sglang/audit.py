"""The audit of a running server: some finished requests are scored again densely on that server.

In: requests on their way to the scheduler and its answers on their way back, in the process that
holds SGLang's TokenizerManager. Out: rows in the mismatch log, statistics in the report. What users
get back is not touched.

A request is audited if it is sampled at temperature 1 without top-p, top-k, min-p, penalties, logit
bias or grammar, under the schedule in force: only then are the log-probs that the sampler saw those
of the sparse distribution itself. Others are counted as skipped.
"""

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_sglang.audit_report import AuditReport
from sparrow_sglang.mismatch import acceptance_bounds
from sparrow_sglang.mismatch_log import MismatchLog, TokenRows
from sparrow_sglang.request_options import KEY
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.scoring import TOP_K, SparseScores, dense_scores, scoring_request

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

BUSY_SHARE = 0.02
"""While users' requests run, at most this share of the tokens they took is prefilled for audits."""

_MAX_WATCHED = 64
_MAX_QUEUED = 64
_POLL_S = 0.2
_PUBLISH_S = 5.0
_IDLE_S = 10.0
_ALL_TOP_K = 1 << 30

logger = logging.getLogger("sparrow_sglang")


@dataclass
class _Watched:
    """A request that is being generated and will be scored again."""

    request_id: str
    prompt: list[int]
    lora_path: str | None
    lora_id: str | None
    user_top_k: int
    epoch: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def record(self, answers: "BatchStrOutput", index: int) -> None:
        """Take what the sampler saw, and leave the user the top-k list that was asked for."""
        self.logprobs += answers.output_token_logprobs_val[index]
        self.tokens += answers.output_token_logprobs_idx[index]
        for mine, lists in (
            (self.top_logprobs, answers.output_top_logprobs_val),
            (self.top_ids, answers.output_top_logprobs_idx),
        ):
            mine += lists[index]
            lists[index] = [row[: self.user_top_k] for row in lists[index]]


class Auditor:
    """Chooses requests, records what the sampler saw, scores them again when there is room.

    Room is when nobody else's request runs, or within BUSY_SHARE of the tokens that users' requests
    took; one request at a time, of the lowest priority where priorities are on. What does not fit
    is dropped and counted. `rate`, the share of auditable requests, may be set at any time.

    Everything runs on the event loop of SGLang's TokenizerManager except numpy and the log.
    """

    def __init__(
        self,
        manager: "TokenizerManager",
        rate: float,
        schedule: BudgetSchedule,
        log: MismatchLog | None,
    ) -> None:
        self.report = AuditReport(schedule, manager.server_args.enable_metrics)
        self._manager = manager
        self.rate = rate
        self._log = log
        self._top_k = min(TOP_K, manager.model_config.vocab_size)
        self._draw = random.Random()
        self._namespace = f"sparrow-audit-{uuid.uuid4().hex}"
        self._prompt_tokens: dict[str, int] = {}
        self._watched: dict[str, _Watched] = {}
        self._queue: deque[_Watched] = deque()
        self._epoch = 0
        self._allowance = 0.0
        self._working = False
        self._suspensions = 0
        self._published = 0.0
        self._audited_since = False
        self._task: asyncio.Task[None] | None = None

    def sees(self, requests: "Sequence[TokenizedGenerateReqInput]") -> None:
        """Requests on their way to the scheduler; chosen ones will carry log-probs back."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
        self._follow_schedule()
        for request in requests:
            parameters = getattr(request, "sampling_params", None)
            if request.extra_key == self._namespace or not getattr(parameters, "max_new_tokens", 0):
                continue
            # SGLang's own health checks.
            if not self._manager.rid_to_state[request.rid].obj.log_metrics:
                continue
            self._prompt_tokens[request.rid] = len(request.input_ids or ())
            if not _is_auditable(request):
                self.report.requests["skipped"] += 1
            elif self._draw.random() < self.rate:
                self._watch(request)

    def receives(self, answers: "BatchStrOutput") -> None:
        """Answers on their way to the users; takes off what only the audit asked for."""
        for index, rid in enumerate(answers.rids):
            watched = self._watched.get(rid)
            if watched is not None:
                watched.record(answers, index)
            reason = answers.finished_reasons[index]
            prompt_tokens = self._prompt_tokens.pop(rid, None) if reason is not None else None
            if reason is None or prompt_tokens is None:
                continue
            served = prompt_tokens + answers.completion_tokens[index]
            room = self._allowance + BUSY_SHARE * served
            self._allowance = min(room, self._manager.context_len)
            if watched is not None:
                del self._watched[rid]
                aborted = reason.get("type") == "abort" or not watched.tokens
                if aborted or watched.epoch != self._epoch or len(self._queue) == _MAX_QUEUED:
                    self.report.requests["dropped"] += 1
                else:
                    self._queue.append(watched)

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Score nothing while the weights change, and nothing later that came from old ones."""
        self._suspensions += 1
        try:
            self._forget()
            while self._working:
                await asyncio.sleep(_POLL_S / 10)
            if not self._prompt_tokens:
                # SGLang flushes its cache after an update, and its scheduler ends itself if it is
                # still busy with what it has just answered, such as a score.
                await self._manager.flush_cache(timeout_s=_IDLE_S)
            yield
        finally:
            self._forget()
            self._suspensions -= 1

    def _forget(self) -> None:
        self._epoch += 1
        self.report.requests["dropped"] += len(self._queue)
        self._queue.clear()

    async def finish(self, wait_s: float = 0.0) -> dict[str, Any]:
        """The report so far, after waiting at most `wait_s` for requests under way; flushes."""
        deadline = time.monotonic() + wait_s
        while self._queue or self._watched or self._working:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S / 10)
        if self._log is not None:
            await self._write(self._log.flush)
        return await asyncio.to_thread(self.report.publish)

    def _watch(self, request: "TokenizedGenerateReqInput") -> None:
        if len(self._watched) == _MAX_WATCHED:
            self.report.requests["dropped"] += 1
            return
        state = self._manager.rid_to_state[request.rid]
        self._watched[request.rid] = _Watched(
            request_id=request.rid,
            prompt=list(request.input_ids),
            lora_path=getattr(state.obj, "lora_path", None),
            lora_id=request.lora_id,
            user_top_k=request.top_logprobs_num if request.return_logprob else 0,
            epoch=self._epoch,
        )
        # The user's own request object stays as it is, and SGLang builds the answer from that.
        request.top_logprobs_num = max(
            self._top_k, request.top_logprobs_num if request.return_logprob else 0
        )
        request.return_logprob = True

    def _follow_schedule(self) -> None:
        """If another schedule has come into force, statistics start anew."""
        loaded = getattr(self._manager, "sparrow_loaded", None)
        if loaded is not None and loaded.in_force != self.report.schedule:
            self._forget()
            self.report.start(loaded.in_force)

    async def _work(self) -> None:
        while self.rate:
            self._forget_vanished()
            self._follow_schedule()
            states = self._manager.rid_to_state
            self.report.publish_load(
                prompt_tokens + len(states[rid].output_ids)
                for rid, prompt_tokens in self._prompt_tokens.items()
            )
            if self._log is not None and self._log.is_due():
                await self._write(self._log.flush)
            # Confidence intervals take a moment of this process' time, which users share.
            if self._audited_since and time.monotonic() - self._published > _PUBLISH_S:
                self._audited_since = False
                await asyncio.to_thread(self.report.publish)
                self._published = time.monotonic()
            if self._suspensions or not self._queue or not self._has_room(self._queue[0]):
                await asyncio.sleep(_POLL_S)
                continue
            watched = self._queue.popleft()
            self._working = True
            try:
                await self._score(watched)
                self.report.requests["audited"] += 1
                self._audited_since = True
            # Whatever is wrong with one request, the server's users and the next must not suffer.
            except Exception as error:
                self.report.requests["failed"] += 1
                logger.warning("audit of request %s failed: %s", watched.request_id, error)
            finally:
                self._working = False

    def _has_room(self, watched: _Watched) -> bool:
        tokens = len(watched.prompt) + len(watched.tokens)
        if self._prompt_tokens and tokens > self._allowance:
            return False
        self._allowance = max(0.0, self._allowance - tokens)
        return True

    def _forget_vanished(self) -> None:
        """Requests that were aborted before they produced anything send no answer."""
        for rid in [rid for rid in self._prompt_tokens if rid not in self._manager.rid_to_state]:
            del self._prompt_tokens[rid]
            if self._watched.pop(rid, None) is not None:
                self.report.requests["dropped"] += 1

    async def _score(self, watched: _Watched) -> None:
        """Score one request again and enter it everywhere.

        Raises whatever SGLang refuses the request with.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        # A generation may fill the context, but a prompt must leave room for one token.
        room = self._manager.context_len - self._manager.num_reserved_tokens - 1
        response = watched.tokens[: room - len(watched.prompt)]
        fields = scoring_request(
            watched.prompt, response, self._top_k, self._namespace, watched.lora_path
        )
        request = GenerateReqInput(**fields, priority=self._lowest_priority(), no_logs=True)
        answer = await anext(self._manager.generate_request(request, None))
        if watched.epoch != self._epoch or request.lora_id != watched.lora_id:
            raise ValueError("weights, adapter or schedule changed meanwhile")
        rows = await asyncio.to_thread(self._measured, watched, response, answer)
        self.report.add(rows)
        if self._log is not None:
            self._log.append(rows)

    def _measured(
        self, watched: _Watched, response: list[int], answer: Mapping[str, Any]
    ) -> TokenRows:
        tokens = len(response)
        sparse = SparseScores(
            logprobs=np.array(watched.logprobs[:tokens]),
            top_ids=np.array(watched.top_ids[:tokens], dtype=np.int64),
            top_logprobs=np.array(watched.top_logprobs[:tokens], dtype=np.float64),
        )
        dense = dense_scores(answer, response)
        alpha = acceptance_bounds(
            sparse.top_ids,
            sparse.top_logprobs,
            dense.top_ids,
            dense.top_logprobs,
            self._manager.model_config.vocab_size,
        )
        schedule = self.report.schedule
        first = len(watched.prompt)
        lengths = range(first, first + tokens)
        return TokenRows(
            request_id=watched.request_id,
            position=np.arange(first, first + tokens),
            token_id=np.array(response),
            kv_budget_tokens=np.array([schedule.kv_budget_tokens(length) for length in lengths]),
            sparse_logprob=sparse.logprobs,
            dense_logprob=dense.logprobs,
            alpha_lower=alpha.lower,
            alpha_upper=alpha.upper,
        )

    async def _write(self, flush: Any) -> None:
        try:
            await asyncio.to_thread(flush)
        except OSError as error:
            self.rate = 0.0
            self._log = None
            logger.error(
                "mismatch log: %s; the audit is off from now on, the server goes on. Make room and"
                " restart the server to audit again",
                error,
            )

    def _lowest_priority(self) -> int | None:
        if not self._manager.enable_priority_scheduling:
            return None
        low_first = self._manager.server_args.schedule_low_priority_values_first
        return 2**31 - 1 if low_first else -(2**31)


def _asks_for_another_law(option: Any) -> bool:
    return bool(option) and set(option) != {"report"}


def _is_auditable(request: "TokenizedGenerateReqInput") -> bool:
    """Whether the sampler sees the model's own distribution, of the schedule in force."""
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
        _asks_for_another_law((parameters.custom_params or {}).get(KEY)),
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
