"""The worker that SGLang's scheduler calls for each batch where drafts are verified.

It takes the place of SGLang's own for its algorithm NGRAM, whose name SGLang's scheduler and LoRA
know. Its drafts are chains and not trees.
"""

import dataclasses
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from sparrow_sglang import sglang_versions
from sparrow_sglang.plugin.drafting.histories import TokenHistories, uploaded
from sparrow_sglang.plugin.drafting.rows import RowsChoice

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs


class DraftWorker(BaseSpecWorker):
    """Drafts tokens, has the model compute them in one pass, and keeps those that it samples.

    Args:
        server_args: SGLang's.
        target_worker: runs the model.
        others: arguments of SGLang's own worker, which need none of them here.
    """

    def __init__(
        self, server_args: "ServerArgs", target_worker: "TpModelWorker", **others: Any
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        # Tokens of a request in a pass: the last one sampled, then the drafts.
        self._most_rows: int = server_args.sparrow_draft_tokens + 1
        # Without graphs, all rows take about as long as one.
        self._choice = RowsChoice([self._most_rows])
        self._graphs: dict[int, DecodeCudaGraphRunner] = {}
        # Of the steps whose results SGLang has yet to process: requests, rows, end of the step
        # before, if there was one, and end.
        self._steps = deque[tuple[int, int, torch.cuda.Event | None, torch.cuda.Event | None]]()
        self._last_end: torch.cuda.Event | None = None
        self._histories: TokenHistories

    @property
    def draft_worker(self) -> None:
        return None

    def alloc_memory_pool(self, **pools: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )
        table = self.req_to_token_pool.req_to_token
        rows, max_tokens = table.shape
        self._histories = TokenHistories(rows, max_tokens, table.device)

    def init_cuda_graphs(self) -> None:
        """Capture what SGLang has captured for the most rows for the other numbers of rows, too."""
        widest = self.model_runner.decode_cuda_graph_runner
        if not isinstance(widest, DecodeCudaGraphRunner):
            return
        self._graphs = {self._most_rows: widest}
        # LoRA has buffers for the graphs of one number of rows.
        if self.model_runner.lora_manager is None:
            widths = [2**power for power in range(self._most_rows.bit_length())]
            self._choice = RowsChoice(sorted({*widths, self._most_rows}))
        for rows in self._choice.widths:
            if rows not in self._graphs:
                self._graphs[rows] = type(widest)(
                    self.model_runner, speculative_num_draft_tokens=rows
                )
            # Compiled before the first request.
            table = self.req_to_token_pool.req_to_token
            none = torch.zeros(1, dtype=torch.int64, device=table.device)
            self._histories.draft(none, rows - 1, none, table)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Called for each verification in turn, when the host has its result."""
        batch, rows, before, end = self._steps.popleft()
        # From end to end, so that what the host does between two steps counts, too.
        ms = before.elapsed_time(end) if before and end else None
        self._choice.measured(batch, rows, ms, num_correct_drafts_per_req)

    def clear_cache_pool(self) -> None:
        """Called when the prefix cache is emptied, which needs an idle scheduler."""
        self._histories.clear()

    def forward_batch_generation(
        self,
        batch: "ScheduleBatch",
        on_publish: Callable[[torch.Tensor], None] | None = None,
        **others: Any,
    ) -> GenerationBatchResult:
        """Run a prefill, or verify the drafts of a decode batch.

        The result has `next_token_ids` [B] of a prefill; else [B * rows], of which the first
        `accept_lens` [B] of each request count, with the `rows` of this step.
        """
        if batch.forward_mode.is_decode():
            return self._verify(batch, on_publish)
        self._last_end = None
        result = self._target_worker.forward_batch_generation(batch, **others)
        tokens, new_seq_lens = result.next_token_ids, batch.seq_lens.clone()
        if not batch.forward_mode.is_idle():
            self._remember_prompts(batch, tokens)
        if on_publish is not None:
            on_publish(new_seq_lens)
        return self._result(result, tokens, 1, torch.ones_like(new_seq_lens), new_seq_lens)

    def _remember_prompts(self, batch: "ScheduleBatch", tokens: torch.Tensor) -> None:
        """Start the history of each request whose prefill is over, with its first sampled token."""
        whole = [
            place
            for place, req in enumerate(batch.reqs)
            if sglang_versions.prefilled_tokens(req)
            == len(req.origin_input_ids) + len(req.output_ids)
        ]
        if not whole:
            return
        reqs = [batch.reqs[place] for place in whole]
        rows = [sglang_versions.kv_of(req).req_pool_idx for req in reqs]
        prompts = [array("q", req.origin_input_ids).tobytes() for req in reqs]
        texts = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        self._histories.start(rows, prompts, texts)
        index = uploaded(whole, torch.int64, tokens.device)
        first = tokens[index][:, None]
        self._histories.accept(batch.req_pool_indices[index].long(), first, first)

    def _verify(
        self, batch: "ScheduleBatch", on_publish: Callable[[torch.Tensor], None] | None
    ) -> GenerationBatchResult:
        if batch.seq_lens.is_cuda:
            record_stream_for_v2_verify(batch, None, torch.cuda.current_stream())
        rows = self._chosen_rows(len(batch.reqs))
        if self._graphs:
            self.model_runner.decode_cuda_graph_runner = self._graphs[rows]
        indices, committed = batch.req_pool_indices.long(), batch.seq_lens
        table = self.req_to_token_pool.req_to_token
        drafts = self._histories.draft(indices, rows - 1, committed, table)
        verified = NgramVerifyInput(
            draft_token=drafts.tokens.flatten(),
            positions=drafts.positions.flatten(),
            draft_token_num=rows,
            new_seq_lens=committed,
        )
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verified.draft_token
        batch.out_cache_loc = drafts.slots.flatten()
        batch.spec_info = verified
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        sampled = self._sample(batch, verified, result.logits_output)
        counts = self._histories.accept(indices, drafts.tokens, sampled)
        batch.forward_mode = ForwardMode.DECODE
        new_seq_lens = committed + counts
        if on_publish is not None:
            on_publish(new_seq_lens)
        end = None
        if self._graphs:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        self._steps.append((len(batch.reqs), rows, self._last_end, end))
        self._last_end = end
        return self._result(result, sampled.flatten(), rows, counts, new_seq_lens)

    def _chosen_rows(self, batch: int) -> int:
        """Rows of the next step, the same on all ranks, which may have measured different times."""
        rows, group = self._choice.choose(batch), get_parallel().tp_group
        return group.broadcast_object(rows, src=0) if group.world_size > 1 else rows

    def _sample(
        self,
        batch: "ScheduleBatch",
        verified: NgramVerifyInput,
        output: "LogitsProcessorOutput",
    ) -> torch.Tensor:
        """A token for each row, [B, rows], as in plain decode, and its log-prob in `output`.

        A token counts if the drafts before it are what was sampled there. So it is a sample of the
        model's distribution, as drafts have no part in sampling.
        """
        rows = verified.draft_token_num
        asked = {
            name: [of_request for of_request in getattr(batch, name) or () for _ in range(rows)]
            for name in ("top_logprobs_nums", "token_ids_logprobs")
        }
        view: Any = SimpleNamespace(
            sampling_info=_of_rows(batch.sampling_info, rows),
            return_logprob=batch.return_logprob,
            positions=verified.positions,
            forward_mode=ForwardMode.DECODE,
            ngram_embedding_info=None,
            **asked,
        )
        sampled = self.model_runner.sample(output, view).view(-1, rows)
        if batch.return_logprob:
            output.next_token_logprobs = output.next_token_logprobs.view(-1, rows)
        return sampled

    def _result(
        self,
        result: GenerationBatchResult,
        tokens: torch.Tensor,
        rows: int,
        counts: torch.Tensor,
        new_seq_lens: torch.Tensor,
    ) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=counts,
            new_seq_lens=new_seq_lens,
            # SGLang carries this to the next step, in one shape; the histories need nothing of it.
            next_draft_input=NgramVerifyInput(
                draft_token_num=1,
                new_seq_lens=new_seq_lens,
                accept_tokens=counts,
                accept_lens=counts,
            ),
            speculative_num_draft_tokens=rows,
        )


def _of_rows(sampling: "SamplingBatchInfo", rows: int) -> "SamplingBatchInfo":
    """The sampling parameters of each row, request by request."""
    if rows == 1:
        return sampling
    names = ["temperatures", "logit_bias"]
    if any(getattr(sampling, f"need_{name}_sampling") for name in ("top_p", "top_k", "min_p")):
        names += ["top_ps", "top_ks", "min_ps"]
    given = {name: getattr(sampling, name) for name in names}
    return dataclasses.replace(
        sampling,
        **{
            name: values.repeat_interleave(rows, 0)
            for name, values in given.items()
            if values is not None
        },
    )
