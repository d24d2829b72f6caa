"""Decode steps by the stock kernel, as long as no request of the batch leaves a page out.

Each batch size is captured twice, sparse and dense. Where a short sparse step is slower than the
dense one, the schedule's `dense_tokens` is set to the length below which it is: a request decodes
densely by its own length alone, whatever its batch, so that reports, audit and trainer count by
the schedule, as ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.hf_config import partial_layers

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

TOLERANCE = 1.02
"""A sparse step is slower from this many times the dense one's seconds on."""
_SHORTEST = 1024
_RUNS = 4
_DENSE, _SPARSE = "sparrow_dense", "sparrow_sparse"


class _Variants(NamedTuple):
    capture_labels: tuple[str, ...] = (_DENSE, _SPARSE)


class DecodeGraphs(DecodeCudaGraphRunner):
    """Captures decode steps in two variants."""

    attention_graph_variants: Any = property(lambda self: _Variants(), lambda self, value: None)

    def __init__(self, model_runner: "ModelRunner", **arguments: Any) -> None:
        self._sparrow = sparrow_backend(model_runner)
        super().__init__(model_runner, **arguments)

    def capture_one_shape(self, *arguments: Any) -> None:
        *_, variant = arguments
        self._sparrow.dense_step = variant == _DENSE
        super().capture_one_shape(*arguments)

    def _resolve_attention_variant(self, forward_batch: ForwardBatch, capture_bs: int) -> str:
        dense = self._sparrow.forced
        if dense is None:
            lengths = forward_batch.seq_lens_cpu
            known = lengths is not None and lengths.numel() > 0
            dense = known and self._sparrow.budgets.reads_everything(int(lengths.max()))
        self._sparrow.dense_step = dense
        return _DENSE if dense else _SPARSE


def measure_dense_tokens(runner: "ModelRunner") -> int:
    """Up to which length sparse steps are slower than dense ones, in whole pages; 0 if nowhere.

    No request may run.
    """
    graphs, model = runner.decode_cuda_graph_runner, runner.model_config
    if (
        not isinstance(graphs, DecodeGraphs)
        or graphs.require_mlp_sync
        or graphs.pp_size > 1
        or runner.lora_manager is not None
        or model.model_is_mrope
        or partial_layers(model.hf_config)
    ):
        return 0
    schedule = sparrow_backend(runner).schedule
    # A loss at small batches is of a few percent, the gain at large ones a multiple.
    batch = min(16, largest_batch(runner))
    lengths = [
        tokens
        for tokens in timed_lengths(runner, batch, model.context_len)
        if tokens >= schedule.first_sparse_length()
    ]
    ratios = [_sparse_to_dense(runner, batch, tokens) for tokens in lengths]
    return crossover(lengths, ratios) // schedule.page_size * schedule.page_size


def largest_batch(runner: "ModelRunner") -> int:
    """Requests of the largest step that is captured and admitted."""
    return min(runner.decode_cuda_graph_runner.max_bs, runner.req_to_token_pool.size)


def timed_lengths(runner: "ModelRunner", batch: int, longest: int) -> Iterator[int]:
    """Two lengths per octave up to `longest` of which `batch` requests fit into the KV pool."""
    for octave in range(longest.bit_length()):
        for tokens in (_SHORTEST << octave, (_SHORTEST << octave) * 3 // 2):
            if tokens <= longest and batch * tokens <= runner.max_total_num_tokens:
                yield tokens


@contextmanager
def requests_in_pool(
    runner: "ModelRunner", batch: int, tokens: int, new: int
) -> Iterator[torch.Tensor]:
    """Within, the first `batch` rows of the token table hold `tokens` distinct slots each, and the
    slot of padding for `new` tokens after them, so that passes over these leave the pool as it is.

    `tokens` is one of `timed_lengths`, a multiple of the page size. Yields the rows, [batch] int64.
    """
    rows = runner.req_to_token_pool.req_to_token[:batch, : tokens + new]
    before = rows.clone()
    slots = torch.arange(batch * tokens, dtype=rows.dtype, device=rows.device)
    rows[:, :tokens] = slots.view(batch, tokens) + sparrow_backend(runner).schedule.page_size
    rows[:, tokens:] = 0
    try:
        yield torch.arange(batch, device=rows.device)
    finally:
        torch.cuda.synchronize()
        rows[:] = before


def least_seconds(run: Callable[[], object]) -> float:
    """Of a few runs, by the device's clock, after one that warms up."""
    run()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairwise(events)) / 1000


def run_pass(
    runner: "ModelRunner",
    rows: torch.Tensor,
    lengths: torch.Tensor,
    lengths_cpu: torch.Tensor | None,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    verified: "DFlashVerifyInput | None" = None,
) -> "ModelRunnerOutput":
    """Run a decode step, or a verification, without sampling.

    Args:
        rows: [B], of the token table.
        lengths: [B], those of the requests with the new token, or without those to verify.
        lengths_cpu: the same on the host, unless the dense side needs none there.
        tokens, positions, slots: [B], or [B * width], of the new tokens.
    """
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if verified is None else ForwardMode.TARGET_VERIFY,
        batch_size=len(rows),
        input_ids=tokens,
        req_pool_indices=rows,
        seq_lens=lengths,
        out_cache_loc=slots,
        seq_lens_sum=None,
        orig_seq_lens=lengths,
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=verified,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    if lengths_cpu is not None:
        # FlashInfer plans a verification by lengths with, and the sum without its tokens.
        forward_batch.seq_lens_sum = int(lengths_cpu.sum())
        width = 0 if verified is None else verified.draft_token_num
        forward_batch.seq_lens_cpu = lengths_cpu + width
    runner.kv_index_translator.bind_own_plan(forward_batch)
    return runner.forward(forward_batch)


def crossover(lengths: list[int], ratios: list[float]) -> int:
    """The length up to which the ratio of sparse to dense seconds exceeds `TOLERANCE`, or 0.

    Halfway between the first of the ascending `lengths` where it does not and the one before.
    """
    for index, ratio in enumerate(ratios):
        if ratio <= TOLERANCE:
            return (lengths[index - 1] + lengths[index]) // 2 if index else 0
    return lengths[-1] if lengths else 0


def _sparse_to_dense(runner: "ModelRunner", batch: int, tokens: int) -> float:
    backend = sparrow_backend(runner)
    with requests_in_pool(runner, batch, tokens, 1) as rows:
        zeros, positions = torch.zeros_like(rows), torch.full_like(rows, tokens)
        lengths = positions + 1
        step = rows, lengths, lengths.cpu(), zeros, positions, zeros

        def seconds(dense: bool) -> float:
            backend.forced = dense
            try:
                return least_seconds(lambda: run_pass(runner, *step))
            finally:
                backend.forced = None

        return seconds(dense=False) / seconds(dense=True)
