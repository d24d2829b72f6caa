"""The worker of lossless decoding: what SGLang's scheduler calls in place of the model's worker.
`round.py` is one round."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.planning.rounds import DENSE, Plan, runs_twice
from sparrow_sglang.plugin.lossless.choice import RoundChoice, RoundTimes
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome, Requests, Written
from sparrow_sglang.plugin.lossless.lookup_kernels import KernelHistories
from sparrow_sglang.plugin.lossless.lookups import Histories
from sparrow_sglang.plugin.lossless.metrics import Drafted, DraftMetrics, Kind
from sparrow_sglang.plugin.lossless.passes import Passes
from sparrow_sglang.plugin.lossless.round import Result, run_round
from sparrow_sglang.plugin.names import LOOKUPS_FIELD
from sparrow_sglang.plugin.scheduler import timing
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.sglang_compat.versions import replica_rank

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class RoundState(SpecInput):
    """What a request carries from round to round.

    Attributes:
        bonus_tokens: [B], the latest token of each request, whose KV is not written yet.
        new_seq_lens: [B], tokens whose KV is.
        future_indices: [B], rows of SGLang's relay that hold both while a round is in flight.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    # The relay reads these.
    topk_p = topk_index = hidden_states = None

    def __post_init__(self) -> None:
        # A type that is neither a draft's nor a verification's.
        super().__init__(SpecInputType.UNO_STATE)
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None) -> None:
        for name in self._carried():
            setattr(self, name, getattr(self, name)[new_indices])

    def merge_batch(self, other: "RoundState") -> None:
        for name in self._carried():
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def _carried(self) -> tuple[str, ...]:
        in_flight = self.future_indices is not None
        return ("future_indices",) if in_flight else ("bonus_tokens", "new_seq_lens")


class LosslessWorker(BaseSpecWorker):
    """Drafts and verifies with the served model, its KV pool and the `sparrow` backend."""

    def __init__(self, server_args: Any, target_worker: Any, **ignored: Any) -> None:
        super().__init__()
        self._target_worker, self._draft_worker = target_worker, None
        self._width = int(get_spec().speculative_num_draft_tokens)
        self._looks_up = not getattr(server_args, LOOKUPS_FIELD)
        self._returns_experts = server_args.enable_return_routed_experts
        self._choice = RoundChoice(self._width, self._looks_up)
        self._passes = Passes(target_worker.model_runner, self._width)
        self._histories: Histories | None = None
        # Rounds whose outcome is not on the host yet, their requests, and drafts accepted in the
        # first of two rounds.
        self._in_flight: deque[tuple[Plan, list[Req], torch.Tensor | None]] = deque()
        self._prefilled = False
        counts = server_args.enable_metrics and get_parallel().tp_rank == 0
        self._metrics = DraftMetrics(server_args, replica_rank(ignored)) if counts else None

    def __getattr__(self, name: str) -> Any:
        # The scheduler takes this for the worker of the model.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
        """In SGLang 0.5.20 a draft model loads them, too, and there is none."""
        return True, "Succeeded to update model weights."

    update_weights_from_ipc = update_weights_from_disk

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: Any, batch_size: int = 0) -> None:
        plan, requests, first = self._in_flight.popleft()
        accepted = np.array([num_correct_drafts_per_req])
        if first is not None:
            accepted = np.stack([first.numpy(), accepted[0] - first.numpy()])
            # SGLang counts it next, as one round: that is the later one.
            num_correct_drafts_per_req[:] = accepted[1].tolist()
        # The scheduler launches a round before it knows which requests the one before has ended.
        running = [not (req.finished() or req.is_retracted) for req in requests]
        rounds = zip(requests, accepted.T.tolist(), strict=True)
        for req, (*earlier, _) in itertools.compress(rounds, running):
            # What SGLang returns as `spec_cap_length` of each round.
            req.spec_num_cap_tokens += len(accepted) * (plan.drafts + plan.lookups)
            for count in earlier:
                req.spec_verify_ct += 1
                req.spec_num_correct_drafts += count
                req.update_spec_correct_drafts_histogram(count)
        for of_round in accepted[:, running]:
            sparse, lookups = self._choice.observe(plan, of_round)
            if self._metrics is not None:
                kinds: dict[Kind, Drafted] = {
                    "sparse": Drafted(plan.drafts * len(requests), *sparse),
                    "lookup": Drafted(plan.lookups * len(requests), *lookups),
                }
                self._metrics.observe(plan.drafts + plan.lookups, kinds)

    def init_cuda_graphs(self) -> None:
        """SGLang has captured the widest verifications, if graphs are on."""
        if self._looks_up:
            table = self.model_runner.req_to_token_pool.req_to_token
            # A round may write past the end of the context.
            longest = self.model_runner.model_config.context_len + 2 * self._width
            histories = KernelHistories if table.is_cuda else Histories
            self._histories = histories(len(table), longest, table.device)
        self._passes.capture()

    def measure(self) -> None:
        """Time rounds, so that they draft what pays; no request may run."""
        if not self._passes.captured:
            return
        runner = self.model_runner
        largest = timing.largest_batch(runner)
        longest = runner.model_config.context_len - self._width
        cases = [
            (batch, tokens)
            for batch in sorted({min(batch, largest) for batch in (1, 4, 16, 64, largest)})
            for tokens in _few(list(timing.timed_lengths(runner, batch, longest)))
        ]
        if not cases:
            return
        self._passes.weights.refresh()
        for plan in self._choice.plans:
            # Compiles the kernels for it.
            self._seconds(*cases[0], plan)
        measured = RoundTimes.measured(self._choice.plans)
        seconds = [[self._seconds(*case, plan) for plan in measured] for case in cases]
        launch_s = self._seconds(*cases[0], DENSE, timing.least_launch_seconds)
        shared, [launch_s] = (
            self._passes.of_first_rank(torch.tensor(values, device=self.device)).tolist()
            for values in (seconds, [launch_s])
        )
        rows = [(*case, *row) for case, row in zip(cases, shared, strict=True)]
        self._choice.times = RoundTimes(self._choice.plans, rows, launch_s)
        if self._histories is not None:
            self._histories.clear()
        if get_parallel().tp_rank == 0:
            announce(self._choice.times.summary())

    def _seconds(
        self,
        batch_size: int,
        tokens: int,
        plan: Plan,
        least: Callable[..., float] = timing.least_seconds,
    ) -> float:
        """Of a round of greedy requests."""
        runner = self.model_runner
        with timing.requests_in_pool(runner, batch_size, tokens, self._width) as rows:
            lengths = torch.full_like(rows, tokens)
            histories = self._histories
            requests = Requests(
                rows,
                lengths,
                lengths.cpu() if sparrow_backend(runner).needs_cpu_seq_lens else None,
                torch.zeros_like(rows),
                _greedy(batch_size, rows.device),
                None if histories is None else histories.timed(batch_size, tokens),
            )
            return least(lambda: self._round(requests, plan))

    def forward_batch_generation(
        self, batch: "ScheduleBatch", on_publish: Any = None, **ignored: Any
    ) -> GenerationBatchResult:
        """One prefill, or one or two rounds. `on_publish` receives the new lengths as soon as they
        are known."""
        self._passes.weights.refresh()
        prefilled, self._prefilled = self._prefilled, batch.forward_mode.is_extend()
        if self._prefilled:
            result = self._target_worker.forward_batch_generation(batch)
            if self._histories is not None:
                self._histories.prefilled(batch.reqs, result.next_token_ids)
            result.new_seq_lens = batch.seq_lens
            result.next_draft_input = RoundState(result.next_token_ids.reshape(-1), batch.seq_lens)
            if on_publish is not None:
                on_publish(result.new_seq_lens)
            return result
        lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
        # SGLang returns a prefill's tokens once it has launched what follows.
        in_pairs = not prefilled and self._runs_in_pairs(batch)
        plan = self._choice.next_round(len(lengths), sum(lengths) / len(lengths), in_pairs)
        sources = None
        if self._histories is not None:
            # The rounds in flight and these may write more than the host knows.
            longest = max(lengths) + (2 + len(self._in_flight)) * self._width
            sources = self._histories.sources(batch.reqs, longest)
        requests = Requests(
            batch.req_pool_indices,
            batch.seq_lens,
            batch.seq_lens_cpu,
            batch.spec_info.bonus_tokens.reshape(-1).long(),
            batch.sampling_info,
            sources,
        )
        passed, outcome, written = self._round(requests, plan)
        first = None
        if batch.return_logprob:
            tokens = written.tokens.view(-1)
            compute_spec_logprobs(batch, passed.logits_output, tokens, chain_stride=plan.rows)
        if in_pairs and runs_twice(plan, self._width):
            first, earlier = outcome.accepted.to("cpu", non_blocking=True), written
            logprobs = passed.logits_output.next_token_logprobs
            requests = _after(requests, outcome, written)
            passed, outcome, written = self._round(requests, plan, earlier)
            if batch.return_logprob:
                _join_logprobs(batch, passed.logits_output, logprobs, earlier, written)
        self._in_flight.append((plan, batch.reqs[:], first))
        if on_publish is not None:
            on_publish(written.lengths)
        return GenerationBatchResult(
            logits_output=passed.logits_output,
            next_token_ids=written.tokens.view(-1),
            accept_lens=written.counts,
            next_draft_input=RoundState(outcome.bonus, written.lengths),
            speculative_output_stride=written.tokens.shape[1],
            num_non_draft_tokens_per_req=1 if first is None else 2,
            new_seq_lens=written.lengths,
            can_run_cuda_graph=passed.can_run_graph,
            routed_experts_output=passed.routed_experts_output,
        )

    def _runs_in_pairs(self, batch: "ScheduleBatch") -> bool:
        """Whether a second narrow round follows the first without a return to SGLang's loop, which
        takes the host as long as a round takes the device in a small model. What SGLang collects
        of a pass would be that of the second alone."""
        waits = batch.seq_lens_cpu is not None and batch.req_pool_indices.is_cuda
        lists = batch.return_logprob and (
            any(batch.top_logprobs_nums or ())
            or any(ids is not None for ids in batch.token_ids_logprobs or ())
        )
        return not (waits or lists or self._returns_experts)

    def _round(self, requests: Requests, plan: Plan, before: Written | None = None) -> Result:
        return run_round(self._passes, self._histories, requests, plan, self._accept, before)

    def _accept(self, drafts: Drafts, logits: torch.Tensor) -> Outcome:
        return drafts.verify(logits)


def _after(requests: Requests, outcome: Outcome, written: Written) -> Requests:
    """The same requests in the next round."""
    known = requests.committed_cpu
    if known is not None:
        known = known + written.counts.cpu()
    return requests._replace(committed=written.lengths, committed_cpu=known, latest=outcome.bonus)


def _join_logprobs(
    batch: "ScheduleBatch", logits: Any, earlier: torch.Tensor, first: Written, both: Written
) -> None:
    """Put log-probs [B, 2 * rows] of the tokens of two rounds into `logits`, the output of the
    second. `earlier` [B, rows] are those of the `first` one."""
    rows = earlier.shape[1]
    tokens = both.tokens.gather(1, first.columns_behind(rows)).view(-1)
    compute_spec_logprobs(batch, logits, tokens, chain_stride=rows)
    logits.next_token_logprobs = first.join(earlier, logits.next_token_logprobs)


def _few(lengths: list[int]) -> list[int]:
    """One length of two octaves, and the longest: rounds take time nearly in proportion to it."""
    return sorted({*lengths[::4], *lengths[-1:]})


def _greedy(requests: int, device: Any) -> Any:
    """What greedy requests have of a `SamplingBatchInfo`."""
    return SimpleNamespace(
        temperatures=torch.ones(requests, 1, device=device),
        top_ks=torch.ones(requests, dtype=torch.int32, device=device),
        is_all_greedy=True,
        is_any_greedy=True,
    )
