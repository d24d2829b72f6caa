"""Decode steps by the stock kernel, as long as no request of the batch leaves a page out. Each
batch size is captured twice, sparse and dense. Where a short sparse step is slower than the dense
one, the schedule's `dense_tokens` is set to the length below which it is: a request decodes densely
by its own length, whatever its batch, so that reports, audit and trainer count by the schedule."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.hf_config import partial_layers
from sparrow_sglang.plugin import passes

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

TOLERANCE = 1.02
"""A sparse step is slower from this many times the dense one's seconds on."""
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

    def _resolve_attention_variant(self, forward_batch: ForwardBatch, *sizes: int) -> str:
        dense = self._sparrow.forced
        if dense is None:
            lengths = forward_batch.seq_lens_cpu
            known = lengths is not None and lengths.numel() > 0
            dense = known and self._sparrow.budgets.reads_everything(int(lengths.max()))
        self._sparrow.dense_step = dense
        return _DENSE if dense else _SPARSE


def measure_dense_tokens(runner: "ModelRunner") -> int:
    """The tokens, in whole pages, up to which sparse steps are slower than dense ones, or 0."""
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
    batch = min(16, passes.largest_batch(runner))
    lengths = [
        tokens
        for tokens in passes.timed_lengths(runner, batch, model.context_len - 1)
        if tokens >= schedule.first_sparse_length()
    ]
    ratios = [_sparse_to_dense(runner, batch, tokens) for tokens in lengths]
    return crossover(lengths, ratios) // schedule.page_size * schedule.page_size


def crossover(lengths: list[int], ratios: list[float]) -> int:
    """The length up to which the ratio of sparse to dense seconds exceeds `TOLERANCE`, or 0.
    Halfway between the first of the ascending `lengths` where it does not and the one before."""
    for index, ratio in enumerate(ratios):
        if ratio <= TOLERANCE:
            return (lengths[index - 1] + lengths[index]) // 2 if index else 0
    return lengths[-1] if lengths else 0


def _sparse_to_dense(runner: "ModelRunner", batch: int, tokens: int) -> float:
    backend = sparrow_backend(runner)
    with passes.requests_in_pool(runner, batch, tokens, 1) as rows:
        zeros, positions = torch.zeros_like(rows), torch.full_like(rows, tokens)
        lengths = positions + 1
        step = rows, lengths, lengths.cpu(), zeros, positions, zeros

        def seconds(dense: bool) -> float:
            backend.forced = dense
            try:
                return passes.least_seconds(lambda: passes.run(runner, *step))
            finally:
                backend.forced = None

        return seconds(dense=False) / seconds(dense=True)
