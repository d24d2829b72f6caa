"""The audit of a running server: some finished requests are scored again densely on that server.
Runs in the process of SGLang's TokenizerManager, and does not change what users receive."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

from sparrow_sglang.mismatch.exact_rates import AUDIT_STEPS, comparing_request, exact_rates
from sparrow_sglang.plugin.launcher.audit.queue import (
    AuditQueue,
    RecordedRequest,
    remove_slots,
    skip_reason,
)
from sparrow_sglang.plugin.launcher.audit.statistics import AuditReport
from sparrow_sglang.plugin.scheduler_calls import is_idle
from sparrow_sglang.schedules.options import request_state
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.sglang_compat.versions import request_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

BUSY_SHARE = 0.02
"""While users' requests run, audits prefill at most this share of the tokens of users' requests."""

_POLL_S = 0.2
_PUBLISH_S = 5.0
# An abort takes effect after the scheduler's current step, which may be a long chunk of a prefill.
_ABORT_S = 10.0
_IDLE_S = 10.0
# A paused scheduler that still holds requests will not become idle, so do not wait for it long.
_PAUSED_IDLE_S = 1.0

logger = logging.getLogger("sparrow_sglang")


class Auditor:
    """Chooses requests, has the scheduler record them, scores them again when there is room. There
    is room when no user's request runs, or when the score stays within BUSY_SHARE of the tokens
    that users' requests took. `rate` is the share of auditable requests to audit; at 0 only the
    load is published. All of it runs on the event loop of the TokenizerManager."""

    def __init__(
        self,
        manager: "TokenizerManager",
        rate: float,
        schedule: BudgetSchedule,
        released: Set[str],
    ) -> None:
        """`released`: tags of the memory that is currently released; the server's own set."""
        self.report = AuditReport(schedule, manager.server_args.enable_metrics)
        self._released = released
        self._manager = manager
        self.rate = rate
        self._draw = random.Random()
        self._namespace = f"sparrow-audit-{uuid.uuid4().hex}"
        self._prompt_tokens: dict[str, int] = {}
        self._queue = AuditQueue(self.report.requests)
        self._allowance = 0.0
        self._holds = 0
        self._published = 0.0
        self._has_scored = False
        self._is_broken = False
        self._worker: asyncio.Task[None] | None = None
        # The score in flight, and the id of its request once sent.
        self._score: asyncio.Task[str] | None = None
        self._sent: str | None = None
        if rate:
            self.report.publish()

    def set_schedule(self, schedule: BudgetSchedule) -> None:
        """Audit under `schedule` from now on; statistics restart if the schedule changed."""
        if schedule != self.report.schedule:
            self._queue.clear()
            self.report.start(schedule)

    def on_requests(self, requests: "Sequence[TokenizedGenerateReqInput]") -> None:
        """Note requests on their way to the scheduler; have chosen ones recorded."""
        if self._is_broken:
            return
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._run())
        for request in requests:
            if request.extra_key == self._namespace:
                self._sent = request.rid
                continue
            self._prompt_tokens[request.rid] = len(request.input_ids or ())
            parameters = getattr(request, "sampling_params", None)
            generates = parameters is not None and parameters.max_new_tokens != 0
            if self.rate and parameters is not None:
                remove_slots(request)
            # SGLang's own health checks and scoring requests cannot be audited.
            state = self._manager.rid_to_state[request.rid]
            if not self.rate or not state.obj.log_metrics or not generates:
                continue
            option, active = request_state(state.obj).option, self.report.schedule
            reason = skip_reason(request, option, active)
            if reason is not None:
                self.report.requests[f"skipped_{reason}"] += 1
            elif self._draw.random() < self.rate:
                self._queue.start(request, getattr(state.obj, "lora_path", None))

    def on_outputs(self, outputs: "BatchStrOutput") -> None:
        """Note outputs on their way to the users; keep the tokens of recorded requests."""
        for index, rid in enumerate(outputs.rids):
            self._queue.record(rid, outputs, index)
            reason = outputs.finished_reasons[index]
            prompt_tokens = self._prompt_tokens.pop(rid, None) if reason is not None else None
            if reason is None or prompt_tokens is None:
                continue
            served = prompt_tokens + outputs.completion_tokens[index]
            room = self._allowance + BUSY_SHARE * served
            self._allowance = min(room, self._manager.context_len)
            self._queue.finish(rid, complete=reason.get("type") != "abort")

    @asynccontextmanager
    async def held_back(self, new_weights: bool = False) -> AsyncIterator[None]:
        """Within this context no score runs or starts, and the scheduler is done with the last one.
        A score in flight is aborted; with `new_weights` no response of the old weights is scored
        afterwards. Waits at most _ABORT_S and _IDLE_S."""
        self._holds += 1
        if new_weights:
            self._queue.clear()
        try:
            await self._end_score()
            if self._has_scored:
                await self._wait_until_idle()
            yield
        finally:
            self._holds -= 1
            if new_weights:
                self._queue.clear()

    async def _end_score(self) -> None:
        score = self._score
        if score is None:
            return
        if self._sent is not None:
            self._manager.abort_request(self._sent)
            await asyncio.wait({score}, timeout=_ABORT_S)
        # A score that has not been sent may wait for a lock that the caller holds.
        score.cancel()
        await asyncio.wait({score})

    async def _wait_until_idle(self) -> None:
        """Wait until the scheduler has finished the last score's step; until then a flush fails."""
        deadline = time.monotonic() + (_PAUSED_IDLE_S if self._manager.is_pause else _IDLE_S)
        while time.monotonic() < deadline:
            self._forget_vanished()
            if self._prompt_tokens or await is_idle(self._manager, retracted=True):
                return
            await asyncio.sleep(_POLL_S / 10)

    async def _run(self) -> None:
        try:
            await self._work()
        except Exception as error:
            self.switch_off(error)

    async def _work(self) -> None:
        while True:
            self._forget_vanished()
            states = self._manager.rid_to_state
            self.report.publish_load(
                (prompt_tokens + len(states[rid].output_ids), request_state(states[rid].obj).option)
                for rid, prompt_tokens in self._prompt_tokens.items()
            )
            audits = self.rate or self._has_scored
            # Rarely, as tails take CPU time of the process that serves users.
            if audits and time.monotonic() - self._published > _PUBLISH_S:
                self.report.publish()
                self._published = time.monotonic()
            first = self._queue.first
            if first is not None and self._may_start(first):
                await self._audit(self._queue.take_first())
            else:
                await asyncio.sleep(_POLL_S)

    def _may_start(self, recorded: RecordedRequest) -> bool:
        if not self.rate or self._holds or self._released or self._manager.is_pause:
            return False
        # SGLang stops once no request is left, so that each score would delay it.
        if self._manager.gracefully_exit:
            return False
        tokens = len(recorded.prompt) + len(recorded.tokens)
        if self._prompt_tokens and tokens > self._allowance:
            return False
        self._allowance = max(0.0, self._allowance - tokens)
        return True

    async def _audit(self, recorded: RecordedRequest) -> None:
        self._sent, self._has_scored = None, True
        score = self._score = asyncio.create_task(self._score_request(recorded))
        await asyncio.wait({score})
        self._score = None
        if score.cancelled():
            outcome = "dropped"
        elif error := score.exception():
            outcome = "failed"
            logger.warning("audit of request %s failed: %s", recorded.request_id, error)
        else:
            outcome = score.result()
        self.report.requests[outcome] += 1
        self._queue.free(recorded)

    def _forget_vanished(self) -> None:
        """Forget requests that were aborted before any output, as none will arrive for them."""
        for rid in [rid for rid in self._prompt_tokens if rid not in self._manager.rid_to_state]:
            del self._prompt_tokens[rid]
            self._queue.finish(rid, complete=False)

    async def _score_request(self, recorded: RecordedRequest) -> str:
        """Score one request densely, and add it to the report; returns its outcome."""
        # A generation may fill the context, but the scheduler takes only prompts that are a few
        # tokens shorter.
        room = self._manager.max_req_input_len - 1 - len(recorded.prompt)
        response = recorded.tokens[: max(0, min(room, AUDIT_STEPS))]
        schedule = self.report.schedule
        if not response:
            return "dropped"
        priority = None
        if self._manager.enable_priority_scheduling:
            low_first = self._manager.server_args.schedule_low_priority_values_first
            priority = 2**31 - 1 if low_first else -(2**31)
        request = request_of(
            comparing_request(recorded.slot, recorded.prompt, response)
            | {
                "extra_key": self._namespace,
                "lora_path": recorded.lora_path,
                "routed_dp_rank": recorded.dp_rank,
                "priority": priority,
                "no_logs": True,
            }
        )
        # Read the stream to its end, where SGLang releases the lock that weight updates wait for.
        answers = [answer async for answer in self._manager.generate_request(request, None)]
        aborted = answers[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        if aborted or request.lora_id != recorded.lora_id:
            return "dropped"
        rates = exact_rates(answers[-1])
        if schedule != self.report.schedule:
            return "dropped"
        # Samples of one prompt are alike.
        self.report.add(blake2b(recorded.prompt).hexdigest(), len(recorded.prompt), rates)
        return "audited"

    def switch_off(self, error: Exception) -> None:
        """End the audit; its worker, too, would meet the error again."""
        self.rate, self._is_broken = 0.0, True
        self._queue.clear()
        logger.error(
            "%r: the audit is off from now on, the server goes on; restart it to audit again",
            error,
            exc_info=error,
        )
