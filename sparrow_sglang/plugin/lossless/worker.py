"""The worker of lossless decoding: a round of drafts and their verification.

With C tokens committed, whose KV is in the pool, and the bonus token after them: sparse decode
steps at positions C to C + k - 1 draft k tokens, then one dense pass over the bonus token and the
drafts, at positions C to C + k, replaces the KV that they wrote. So committed KV is always dense.
"""

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.plugin.dense_steps import (
    DecodeGraphs,
    largest_batch,
    requests_in_pool,
    timed_lengths,
)
from sparrow_sglang.plugin.lossless import acceptance
from sparrow_sglang.plugin.lossless.algorithm import RoundState
from sparrow_sglang.plugin.lossless.pace import CostTable, Pace
from sparrow_sglang.plugin.lossless.refusals import FORCED_ACCEPTANCE
from sparrow_sglang.plugin.server_log import announce

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


_RUNS = 4


def _verify_input(width: int, positions: torch.Tensor) -> DFlashVerifyInput:
    """What SGLang's attention backends read of a verification of `width` tokens in sequence."""
    return DFlashVerifyInput(
        draft_token=None,
        positions=positions,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _wall_seconds(run: Callable[[], None]) -> float:
    """Mean of a few runs in sequence, after one that warms up."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_RUNS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _RUNS


class VerifyGraphs(DecodeCudaGraphRunner):
    """Captures verifications, whose `spec_info` SGLang does not know."""

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        return _verify_input(self.captured_req_width, self.buffers.positions[:num_tokens])

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        # SGLang compares widths only where there is a `spec_info`, which a draft has not. Replayed
        # as a verification, it would write KV to stale slots.
        verifies = forward_batch.forward_mode.is_target_verify()
        return verifies and bool(super().can_run_graph(forward_batch))


class LosslessWorker(BaseSpecWorker):
    """Drafts and verifies with the served model, its KV pool and the `sparrow` backend."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self._draft_worker = None
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        self.speculative_num_draft_tokens = int(get_spec().speculative_num_draft_tokens)
        self.speculative_num_steps = self.speculative_num_draft_tokens - 1
        self.topk = 1
        self._draft_graphs: Any = None
        self._pace = Pace(self.speculative_num_steps)
        is_first = get_parallel().tp_rank == 0
        counts = server_args.enable_metrics and is_first
        self._counters = acceptance.DraftCounters() if counts else None
        forced = os.environ.get(FORCED_ACCEPTANCE)
        self._forced = None if forced is None else float(forced)
        if self._forced is not None and is_first:
            announce(f"{FORCED_ACCEPTANCE}={forced}: ANSWERS ARE WRONG, for benchmarks only")
        self._positions = torch.arange(self.speculative_num_draft_tokens, device=self.device)

    def __getattr__(self, name: str) -> Any:
        # The scheduler takes this for the worker of the model.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: Any, batch_size: int = 0) -> None:
        self._pace.observe(num_correct_drafts_per_req)
        if self._counters is not None:
            self._counters.publish()

    def init_cuda_graphs(self) -> None:
        """Capture draft and dense steps; SGLang has captured verifications, if graphs are on."""
        runner = self.model_runner
        if runner.decode_cuda_graph_runner is None:
            return
        algorithm, runner.spec_algorithm = runner.spec_algorithm, SpeculativeAlgorithm.NONE
        try:
            self._draft_graphs = DecodeGraphs(runner)
        finally:
            runner.spec_algorithm = algorithm

    def measure(self) -> None:
        """Time the steps of a round over the empty KV pool, so that rounds draft what pays."""
        if self._draft_graphs is None:
            return
        longest = self.model_runner.model_config.context_len - self.speculative_num_draft_tokens
        largest = largest_batch(self.model_runner)
        batches = sorted({*(batch for batch in (1, 4, 16, 64) if batch < largest), largest})
        cases = [
            (batch, tokens)
            for batch in batches
            for tokens in timed_lengths(self.model_runner, batch, longest)
        ]
        if not cases:
            return
        most = self.speculative_num_steps
        for count in range(1, most):
            # Compiles the kernels for it.
            self._seconds(*cases[0], count)
        seconds = torch.tensor(
            [self._seconds(*case, most) for case in cases], dtype=torch.float64, device=self.device
        )
        costs = self._of_first_rank(seconds).tolist()
        self._pace.costs = CostTable(
            [(*case, *row) for case, row in zip(cases, costs, strict=True)]
        )
        if get_parallel().tp_rank == 0:
            announce(self._pace.costs.summary(most))

    def _seconds(self, batch_size: int, tokens: int, count: int) -> list[float]:
        """`Costs` with `count` drafts, with their sampling and the work of the host."""
        runner, width = self.model_runner, self.speculative_num_draft_tokens
        with requests_in_pool(runner, batch_size, tokens + width) as rows:
            committed = torch.full_like(rows, tokens)
            needs_lengths = sparrow_backend(runner).needs_cpu_seq_lens
            batch: Any = SimpleNamespace(
                req_pool_indices=rows,
                spec_algorithm=runner.spec_algorithm,
                seq_lens_cpu=committed.cpu() if needs_lengths else None,
            )
            positions = committed[:, None] + self._positions
            slots = runner.req_to_token_pool.req_to_token[rows[:, None], positions].long()
            step = next(self._draft_steps(batch, committed, positions, slots))
            step.input_ids = torch.zeros_like(rows)
            info: Any = SimpleNamespace(
                temperatures=torch.ones(batch_size, 1, device=self.device),
                top_ks=torch.full_like(rows, 1 << 30, dtype=torch.int32),
                is_all_greedy=False,
                is_any_greedy=False,
                need_top_k_sampling=False,
                need_top_p_sampling=False,
                need_min_p_sampling=False,
            )
            vocabulary = runner.model_config.vocab_size
            drafts = acceptance.Drafts(step.input_ids, width - 1, vocabulary, info)
            verification = self._verification(batch, committed, positions, slots, drafts.tokens.T)

            def run(forward_batch: ForwardBatch, verified: int | None) -> None:
                """Sample a draft, or verify so many."""
                result = self._forward(copy.copy(forward_batch))
                logits = result.logits_output.next_token_logits
                drafts.count = verified or 0
                if verified is None:
                    drafts.sample(logits)
                else:
                    drafts.verify(logits.unflatten(0, (batch_size, -1)))

            with self._drafting(dense=False):
                draft = _wall_seconds(lambda: run(step, None))
            drafts.ids[:], drafts.q[:] = drafts.ids[:, :1].clone(), drafts.q[:, :1].clone()
            with self._drafting(dense=True):
                dense = _wall_seconds(lambda: run(step, 0))
            return [draft, _wall_seconds(lambda: run(verification, count)), dense]

    def forward_batch_generation(
        self, batch: "ScheduleBatch", on_publish: Any = None, **ignored: Any
    ) -> GenerationBatchResult:
        """One prefill, or one round. `on_publish` receives the new lengths as soon as known."""
        if batch.forward_mode.is_extend():
            result = self._target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens
            result.next_draft_input = RoundState(result.next_token_ids.reshape(-1), batch.seq_lens)
            if on_publish is not None:
                on_publish(result.new_seq_lens)
            return result
        return self._round(batch, on_publish)

    def _round(self, batch: "ScheduleBatch", on_publish: Any) -> GenerationBatchResult:
        width, info = self.speculative_num_draft_tokens, batch.sampling_info
        # The scheduler may change its lengths before this round has run.
        committed, rows = batch.seq_lens.clone(), batch.req_pool_indices
        positions = committed[:, None].long() + self._positions
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = table[rows.long()[:, None], positions].long()
        tokens = batch.spec_info.bonus_tokens.reshape(-1).long()
        vocabulary = self.model_runner.model_config.vocab_size
        drafts = acceptance.Drafts(tokens, self.speculative_num_steps, vocabulary, info)
        lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
        count = self._pace.next_round(len(lengths), sum(lengths) / len(lengths))
        steps = self._draft_steps(batch, committed, positions, slots)
        with self._drafting():
            for step in islice(steps, count):
                step.input_ids = tokens
                result = self._forward(step)
                # The next replay overwrites the logits.
                tokens = drafts.sample(result.logits_output.next_token_logits)
                # In place, so that all ranks verify the same drafts.
                self._of_first_rank(tokens)
        to_verify = drafts.tokens.T.contiguous()
        # SGLang reads the log-probs of a round from as many rows as a verification has.
        if count or batch.return_logprob:
            verify = self._verification(batch, committed, positions, slots, to_verify)
            verified = self._forward(verify)
        else:
            step = next(steps)
            step.input_ids = tokens
            with self._drafting(dense=True):
                verified = self._forward(step)
        logits_output = verified.logits_output
        logits = logits_output.next_token_logits.unflatten(0, (len(committed), -1))
        outcome = drafts.verify(logits)
        if self._counters is not None:
            self._counters.add(outcome)
        if self._forced is not None:
            outcome = outcome.forced(self._forced)
        accepted = self._of_first_rank(outcome.accepted)
        outcome = outcome._replace(accepted=accepted, bonus=self._of_first_rank(outcome.bonus))
        output = outcome.output(to_verify[:, 1:]).reshape(-1)
        accept_lens = (accepted + 1).to(torch.int32)
        new_seq_lens = committed + accept_lens.to(committed.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, output, chain_stride=width)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=output,
            accept_lens=accept_lens,
            next_draft_input=RoundState(outcome.bonus, new_seq_lens),
            speculative_num_draft_tokens=width,
            new_seq_lens=new_seq_lens,
            can_run_cuda_graph=verified.can_run_cuda_graph,
        )

    def _forward_batch(
        self, batch: "ScheduleBatch", mode: ForwardMode, committed: torch.Tensor
    ) -> ForwardBatch:
        """A pass over the batch's requests; its tokens are to be set."""
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(committed),
            input_ids=None,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=committed,
            out_cache_loc=None,
            seq_lens_sum=None,
            orig_seq_lens=committed,
            spec_algorithm=batch.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )

    def _verification(
        self,
        batch: "ScheduleBatch",
        committed: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor,
    ) -> ForwardBatch:
        width = self.speculative_num_draft_tokens
        verify = self._forward_batch(batch, ForwardMode.TARGET_VERIFY, committed)
        verify.input_ids = tokens.reshape(-1)
        verify.positions, verify.out_cache_loc = positions.reshape(-1), slots.reshape(-1)
        verify.spec_info = _verify_input(width, verify.positions)
        if batch.seq_lens_cpu is not None:
            # FlashInfer plans by the lengths with, and the sum without the tokens to verify.
            verify.seq_lens_cpu = batch.seq_lens_cpu + width
            verify.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        return verify

    def _draft_steps(
        self,
        batch: "ScheduleBatch",
        committed: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> Iterator[ForwardBatch]:
        """The decode step of each draft; its token is to be set."""
        by_step = positions.T.contiguous(), slots.T.contiguous()
        lengths = by_step[0].to(committed.dtype) + 1
        for number in range(self.speculative_num_steps):
            step = self._forward_batch(batch, ForwardMode.DECODE, lengths[number])
            step.positions, step.out_cache_loc = (rows[number] for rows in by_step)
            if batch.seq_lens_cpu is not None:
                step.seq_lens_cpu = batch.seq_lens_cpu + number + 1
                step.seq_lens_sum = int(step.seq_lens_cpu.sum())
            yield step

    def _forward(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        """Run a pass without sampling."""
        self.model_runner.kv_index_translator.bind_own_plan(forward_batch)
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )

    @contextmanager
    def _drafting(self, dense: bool | None = None) -> Iterator[None]:
        """Within, passes replay the graphs of drafts; `dense` is `SparrowAttnBackend.forced`."""
        runner = self.model_runner
        backend = sparrow_backend(runner)
        backend.forced = dense
        verify_graphs = runner.decode_cuda_graph_runner
        runner.decode_cuda_graph_runner = self._draft_graphs
        try:
            yield
        finally:
            runner.decode_cuda_graph_runner = verify_graphs
            backend.forced = None
            # A verification without a graph sets no event of its own. With that of the last draft
            # the scheduler would change the token table while the verification reads it.
            runner.shared_read_done_event = None

    def _of_first_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of rank 0: logits of ranks may differ by rounding, and samples do."""
        group = get_parallel().tp_group
        if group.world_size > 1:
            tensor = tensor.contiguous()
            group.broadcast(tensor, src=0)
        return tensor
