"""The worker that SGLang's scheduler calls for each batch where drafts are verified.

It takes the place of SGLang's own for its algorithm NGRAM, whose name SGLang's scheduler and LoRA
know. Its drafts are chains and not trees.
"""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from sparrow_sglang import sglang_versions
from sparrow_sglang.plugin.drafting.histories import TokenHistories, uploaded
from sparrow_sglang.plugin.drafting.sampling import accept_drafts, distribution

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
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
        self._rows: int = server_args.sparrow_draft_tokens + 1
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
        `accept_lens` [B] of each request count.
        """
        if batch.forward_mode.is_decode():
            return self._verify(batch, on_publish)
        result = self._target_worker.forward_batch_generation(batch, **others)
        tokens, new_seq_lens = result.next_token_ids, batch.seq_lens.clone()
        if not batch.forward_mode.is_idle():
            self._remember_prompts(batch, tokens)
        if on_publish is not None:
            on_publish(new_seq_lens)
        padded = torch.nn.functional.pad(tokens[:, None].long(), (0, self._rows - 1))
        return self._result(
            result, tokens, padded.flatten(), torch.ones_like(new_seq_lens), new_seq_lens
        )

    def _remember_prompts(self, batch: "ScheduleBatch", tokens: torch.Tensor) -> None:
        """Start the history of each request whose prefill is over, with its first sampled token."""
        texts = [[*req.origin_input_ids, *req.output_ids] for req in batch.reqs]
        whole = [
            place
            for place, (req, text) in enumerate(zip(batch.reqs, texts, strict=True))
            if sglang_versions.prefilled_tokens(req) == len(text)
        ]
        if not whole:
            return
        reqs = [batch.reqs[place] for place in whole]
        rows = [sglang_versions.kv_of(req).req_pool_idx for req in reqs]
        prompts = [array("q", req.origin_input_ids).tobytes() for req in reqs]
        self._histories.start(rows, prompts, [texts[place] for place in whole])
        index = uploaded(whole, torch.int64, tokens.device)
        self._histories.append(
            batch.req_pool_indices[index].long(), tokens[index][:, None], torch.ones_like(index)
        )

    def _verify(
        self, batch: "ScheduleBatch", on_publish: Callable[[torch.Tensor], None] | None
    ) -> GenerationBatchResult:
        if batch.seq_lens.is_cuda:
            record_stream_for_v2_verify(batch, None, torch.cuda.current_stream())
        rows = self._rows
        indices, committed = batch.req_pool_indices.long(), batch.seq_lens
        tokens = self._histories.draft(indices, rows - 1)
        positions = committed[:, None] + torch.arange(rows, device=committed.device)
        verified = NgramVerifyInput(
            draft_token=tokens.flatten(),
            positions=positions.flatten(),
            draft_token_num=rows,
            new_seq_lens=committed,
            **_chain_links(len(batch.reqs), rows, committed.device),
        )
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verified.draft_token
        slots = self.req_to_token_pool.req_to_token[indices[:, None], positions]
        batch.out_cache_loc = slots.flatten().long()
        batch.spec_info = verified
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        sampled, counts = self._sample(batch, verified, result.logits_output)
        if batch.return_logprob:
            _add_log_probs(batch, result.logits_output, sampled)
        batch.forward_mode = ForwardMode.DECODE
        new_seq_lens = committed + counts
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._histories.append(indices, sampled, counts)
        return self._result(result, sampled.flatten(), sampled.flatten(), counts, new_seq_lens)

    def _sample(
        self,
        batch: "ScheduleBatch",
        verified: NgramVerifyInput,
        output: "LogitsProcessorOutput",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled tokens [B, rows] and how many of them count, [B]."""
        if batch.seq_lens.is_cuda:
            from sglang.srt.speculative.eagle_utils import eagle_sample

            predicted, counts, _ = eagle_sample(verified, batch, output)
            # Accepted tokens of a chain lie in the order of its rows.
            return predicted.view(-1, self._rows).long(), counts.long()
        # SGLang verifies greedily on a CPU, whatever the temperature.
        probs = distribution(output.next_token_logits, batch.sampling_info, self._rows)
        drafts = verified.draft_token.view(-1, self._rows)[:, 1:]
        sampled, counts = accept_drafts(probs, drafts)
        group = get_parallel().tp_group
        if group.world_size > 1:
            group.broadcast(sampled, src=0)
            group.broadcast(counts, src=0)
        return sampled, counts

    def _result(
        self,
        result: GenerationBatchResult,
        tokens: torch.Tensor,
        padded: torch.Tensor,
        counts: torch.Tensor,
        new_seq_lens: torch.Tensor,
    ) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=counts,
            new_seq_lens=new_seq_lens,
            # SGLang carries it to the next step; the histories need nothing of it.
            next_draft_input=NgramVerifyInput(
                draft_token_num=self._rows,
                new_seq_lens=new_seq_lens,
                accept_tokens=padded,
                accept_lens=counts,
            ),
            speculative_num_draft_tokens=self._rows,
        )


def _chain_links(batch: int, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """How SGLang writes chains of `rows` tokens as trees, [batch, rows] each."""
    place = torch.arange(batch * rows, device=device).view(batch, rows)
    following = torch.arange(1, rows + 1, device=device).repeat(batch, 1)
    following[:, -1] = -1
    return {
        "retrieve_index": place,
        "retrieve_next_token": following,
        "retrieve_next_sibling": torch.full_like(place, -1),
    }


def _add_log_probs(
    batch: "ScheduleBatch", output: "LogitsProcessorOutput", sampled: torch.Tensor
) -> None:
    """Write the log-probs of the sampled tokens [B, rows] into `output`, as plain decode does."""
    place = torch.arange(sampled.numel(), device=sampled.device).view_as(sampled)
    compute_spec_logprobs(batch, output, sampled.flatten(), accept_index=place)
