"""The worker of lossless decoding: rounds as docs/lossless.md describes them, and their timing."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.plugin.lossless.draft_length import DraftLength, RoundTimes
from sparrow_sglang.plugin.lossless.draft_weights import DraftWeights
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome
from sparrow_sglang.plugin.lossless.kernels import KernelDrafts
from sparrow_sglang.plugin.lossless.metrics import Drafted, DraftMetrics
from sparrow_sglang.plugin.names import WEIGHTS_FIELD
from sparrow_sglang.plugin.scheduler import forward, timing
from sparrow_sglang.plugin.scheduler.graphs import SPARSE, DecodeGraphs
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.sglang_compat.versions import replica_rank

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class VerifyGraphs(DecodeCudaGraphRunner):
    """Captures verifications, whose `spec_info` SGLang does not know."""

    def get_spec_info(self, num_tokens: int) -> Any:
        return forward.verify_input(self.captured_req_width, self.buffers.positions[:num_tokens])

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        # SGLang compares widths only where there is a `spec_info`, which a draft has not. Replayed
        # as a verification, it would write KV to stale slots.
        verifies = forward_batch.forward_mode.is_target_verify()
        return verifies and bool(super().can_run_graph(forward_batch))


class DraftGraphs(DecodeGraphs):
    """Captures dense steps with the model's weights, and drafts with `weights`."""

    def __init__(self, runner: Any, weights: DraftWeights) -> None:
        self._weights = weights
        super().__init__(runner)

    def capture_one_shape(self, *arguments: Any) -> None:
        *_, variant = arguments
        with self._weights.in_use(variant == SPARSE):
            super().capture_one_shape(*arguments)


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
        self._draft_graphs: Any = None
        self._draft_length = DraftLength(self._width - 1)
        self._weights: DraftWeights = getattr(target_worker.model_runner, WEIGHTS_FIELD)
        # Drafts and requests of the rounds whose outcome is not on the host yet.
        self._in_flight: deque[tuple[int, list[Req]]] = deque()
        counts = server_args.enable_metrics and get_parallel().tp_rank == 0
        self._metrics = DraftMetrics(server_args, replica_rank(ignored)) if counts else None
        self._positions = torch.arange(self._width, device=self.device)[:, None]

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
        drafts, requests = self._in_flight.popleft()
        # The scheduler launches a round before it knows which requests the one before has ended.
        accepted = [
            count
            for count, req in zip(num_correct_drafts_per_req, requests, strict=False)
            if not (req.finished() or req.is_retracted)
        ]
        counts = self._draft_length.observe(drafts, accepted)
        if self._metrics is not None:
            self._metrics.observe(drafts, {"sparse": Drafted(drafts * len(requests), *counts)})

    def init_cuda_graphs(self) -> None:
        """Capture draft and dense steps; SGLang has captured verifications, if graphs are on."""
        runner = self.model_runner
        if runner.decode_cuda_graph_runner is None:
            return
        algorithm, runner.spec_algorithm = runner.spec_algorithm, SpeculativeAlgorithm.NONE
        try:
            self._draft_graphs = DraftGraphs(runner, self._weights)
        finally:
            runner.spec_algorithm = algorithm

    def measure(self) -> None:
        """Time rounds, so that they draft what pays; no request may run."""
        if self._draft_graphs is None:
            return
        runner, most = self.model_runner, self._width - 1
        largest = timing.largest_batch(runner)
        longest = runner.model_config.context_len - self._width
        cases = [
            (batch, tokens)
            for batch in sorted({min(batch, largest) for batch in (1, 4, 16, 64, largest)})
            for tokens in islice(timing.timed_lengths(runner, batch, longest), 0, None, 2)
        ]
        if not cases:
            return
        self._weights.refresh()
        for count in range(most):
            # Compiles the kernels for it.
            self._seconds(*cases[0], count)
        seconds = [[self._seconds(*case, count) for count in (0, 1, most)] for case in cases]
        shared = self._of_first_rank(torch.tensor(seconds, device=self.device)).tolist()
        times = RoundTimes(most, [(*case, *row) for case, row in zip(cases, shared, strict=True)])
        self._draft_length.times = times
        if get_parallel().tp_rank == 0:
            announce(times.summary())

    def _seconds(self, batch_size: int, tokens: int, count: int) -> float:
        """Of a round of greedy requests with `count` drafts."""
        runner = self.model_runner
        with timing.requests_in_pool(runner, batch_size, tokens, self._width) as rows:
            lengths = torch.full_like(rows, tokens)
            batch: Any = SimpleNamespace(
                req_pool_indices=rows,
                seq_lens=lengths,
                seq_lens_cpu=lengths.cpu() if sparrow_backend(runner).needs_cpu_seq_lens else None,
                spec_info=RoundState(torch.zeros_like(rows), lengths),
                return_logprob=False,
                sampling_info=SimpleNamespace(
                    temperatures=torch.ones(batch_size, 1, device=self.device),
                    top_ks=torch.ones_like(rows),
                    is_all_greedy=True,
                    is_any_greedy=True,
                ),
            )
            return timing.least_seconds(lambda: self._round(batch, count))

    def forward_batch_generation(
        self, batch: "ScheduleBatch", on_publish: Any = None, **ignored: Any
    ) -> GenerationBatchResult:
        """One prefill, or one round. `on_publish` receives the new lengths as soon as known."""
        self._weights.refresh()
        if batch.forward_mode.is_extend():
            result = self._target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens
            result.next_draft_input = RoundState(result.next_token_ids.reshape(-1), batch.seq_lens)
            if on_publish is not None:
                on_publish(result.new_seq_lens)
            return result
        lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
        count = self._draft_length.next_round(len(lengths), sum(lengths) / len(lengths))
        self._in_flight.append((count, batch.reqs[:]))
        return self._round(batch, count, on_publish)

    def _round(
        self, batch: "ScheduleBatch", count: int, on_publish: Any = None
    ) -> GenerationBatchResult:
        """A round with `count` drafts."""
        runner, config = self.model_runner, self.model_runner.model_config
        # The scheduler may change its lengths before this round has run.
        committed, rows = batch.seq_lens.clone(), batch.req_pool_indices
        positions = committed.long() + self._positions
        lengths = positions.to(committed.dtype) + 1
        slots = runner.req_to_token_pool.req_to_token[rows.long(), positions].long()
        # Past the context no token is returned, and some models have no rotary angles.
        positions = positions.clamp(max=config.context_len - 1)
        latest, known = batch.spec_info.bonus_tokens.reshape(-1).long(), batch.seq_lens_cpu
        drafting = KernelDrafts if latest.is_cuda else Drafts
        drafts = drafting(latest, self._width - 1, config.vocab_size, batch.sampling_info)

        def decode(number: int) -> Any:
            """The decode step after the latest token and `number` drafts."""
            on_host = None if known is None else known + number + 1
            token, position, slot = drafts.tokens[number], positions[number], slots[number]
            return forward.run(runner, rows, lengths[number], on_host, token, position, slot)

        with self._drafting():
            for number in range(count):
                # At once, as the next replay overwrites the logits.
                draft = drafts.sample(decode(number).logits_output.next_token_logits)
                # In place, so that all ranks verify the same drafts.
                self._of_first_rank(draft)
        if count:
            flat = [tensor.T.reshape(-1) for tensor in (drafts.tokens, positions, slots)]
            result = forward.run(runner, rows, committed, known, *flat)
        else:
            with self._drafting(dense=True):
                result = decode(0)
        logits = result.logits_output.next_token_logits.unflatten(0, (len(rows), -1))
        outcome = Outcome(*map(self._of_first_rank, self._verify(drafts, logits)))
        stride = logits.shape[1]
        output = outcome.output(drafts.tokens[:stride].T).reshape(-1)
        accept_lens = (outcome.accepted + 1).to(torch.int32)
        new_seq_lens = committed + accept_lens.to(committed.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, output, chain_stride=stride)
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=output,
            accept_lens=accept_lens,
            next_draft_input=RoundState(outcome.bonus, new_seq_lens),
            speculative_output_stride=stride,
            new_seq_lens=new_seq_lens,
            can_run_cuda_graph=result.can_run_graph,
            routed_experts_output=result.routed_experts_output,
        )

    def _verify(self, drafts: Drafts, logits: torch.Tensor) -> Outcome:
        return drafts.verify(logits)

    @contextmanager
    def _drafting(self, dense: bool = False) -> Iterator[None]:
        """Within, passes are drafts, or `dense` steps, and replay the graphs of these."""
        runner, backend = self.model_runner, sparrow_backend(self.model_runner)
        # Drafts with the model's weights are dense steps where the budget covers the context.
        backend.dense_override = True if dense else False if self._weights.copies else None
        verify_graphs = runner.decode_cuda_graph_runner
        runner.decode_cuda_graph_runner = self._draft_graphs
        try:
            with self._weights.in_use(not dense):
                yield
        finally:
            runner.decode_cuda_graph_runner = verify_graphs
            backend.dense_override = None
            # A verification without a graph sets no event of its own. With that of the last draft
            # the scheduler would change the token table while the verification reads it.
            if not dense:
                runner.shared_read_done_event = None

    def _of_first_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of rank 0: logits of ranks may differ by rounding, and samples do."""
        group = get_parallel().tp_group
        if group.world_size > 1:
            tensor = tensor.contiguous()
            group.broadcast(tensor, src=0)
        return tensor
