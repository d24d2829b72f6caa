"""Decode steps by the stock kernel, as long as no request of the batch leaves a page out.

Each batch size is captured twice, sparse and dense. Where a short sparse step is slower than the
dense one, the schedule's `dense_tokens` is set to the length below which it is: a request decodes
densely by its own length alone, whatever its batch, so that reports, audit and trainer count by
the schedule, as ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    from sglang.srt.model_executor.model_runner import ModelRunner

TOLERANCE = 1.02
"""A sparse step is slower from this many times the dense one's seconds on."""
_SHORTEST = 1024
_REPLAYS = 4
_DENSE, _SPARSE = "sparrow_dense", "sparrow_sparse"


class _Variants(NamedTuple):
    capture_labels: tuple[str, ...] = (_DENSE, _SPARSE)


class DecodeGraphs(DecodeCudaGraphRunner):
    """Captures decode steps in two variants."""

    attention_graph_variants: Any = property(lambda self: _Variants(), lambda self, value: None)

    def __init__(self, model_runner: "ModelRunner", **arguments: Any) -> None:
        self._sparrow = sparrow_backend(model_runner)
        self._sparrow.dense_steps = True
        super().__init__(model_runner, **arguments)

    def capture_one_shape(
        self,
        size: int,
        forward: Callable[..., Any],
        stream_idx: int | None = None,
        variant_label: str | None = None,
        attention_variant: str | None = None,
    ) -> None:
        self._sparrow.dense_step = attention_variant == _DENSE
        super().capture_one_shape(size, forward, stream_idx, variant_label, attention_variant)

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

    Replays both variants over the empty KV pool, so no request may run.
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
    ratios = [_sparse_to_dense(runner, graphs, batch, tokens) for tokens in lengths]
    return crossover(lengths, ratios) // schedule.page_size * schedule.page_size


def largest_batch(runner: "ModelRunner") -> int:
    """Requests of the largest step that is captured and admitted."""
    return min(runner.decode_cuda_graph_runner.max_bs, runner.req_to_token_pool.size)


def timed_lengths(runner: "ModelRunner", batch: int, longest: int) -> Iterator[int]:
    """Two lengths per octave up to `longest` of which `batch` requests fit into the KV pool."""
    page_size = sparrow_backend(runner).schedule.page_size
    room = runner.max_total_num_tokens - page_size
    for octave in range(longest.bit_length()):
        for tokens in (_SHORTEST << octave, (_SHORTEST << octave) * 3 // 2):
            if tokens <= longest and batch * (tokens + page_size) <= room:
                yield tokens


@contextmanager
def requests_in_pool(runner: "ModelRunner", batch: int, tokens: int) -> Iterator[torch.Tensor]:
    """Within, the first `batch` rows of the token table hold `tokens` distinct slots each.

    Yields the rows, [batch] int64.
    """
    table = runner.req_to_token_pool.req_to_token
    page_size = sparrow_backend(runner).schedule.page_size
    stride = -(-tokens // page_size) * page_size
    slots = torch.arange(batch * stride, dtype=table.dtype, device=table.device) + page_size
    before = table[:batch, :tokens].clone()
    table[:batch, :tokens] = slots.view(batch, stride)[:, :tokens]
    try:
        yield torch.arange(batch, device=table.device)
    finally:
        torch.cuda.synchronize()
        table[:batch, :tokens] = before


def crossover(lengths: list[int], ratios: list[float]) -> int:
    """The length up to which the ratio of sparse to dense seconds exceeds `TOLERANCE`, or 0.

    Halfway between the first of the ascending `lengths` where it does not and the one before.
    """
    for index, ratio in enumerate(ratios):
        if ratio <= TOLERANCE:
            return (lengths[index - 1] + lengths[index]) // 2 if index else 0
    return lengths[-1] if lengths else 0


def _sparse_to_dense(runner: "ModelRunner", graphs: DecodeGraphs, batch: int, tokens: int) -> float:
    with requests_in_pool(runner, batch, tokens) as rows:
        table = runner.req_to_token_pool.req_to_token
        lengths = torch.full_like(rows, tokens)
        step = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=batch,
            input_ids=torch.zeros_like(rows),
            req_pool_indices=rows,
            seq_lens=lengths,
            out_cache_loc=table[:batch, tokens - 1].long(),
            seq_lens_sum=batch * tokens,
            seq_lens_cpu=lengths.cpu(),
            orig_seq_lens=lengths,
            positions=lengths - 1,
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        runner.kv_index_translator.bind_own_plan(step)
        return _seconds(graphs, step, dense=False) / _seconds(graphs, step, dense=True)


def _seconds(graphs: DecodeGraphs, step: ForwardBatch, dense: bool) -> float:
    """Least seconds of a few replays."""
    backend = sparrow_backend(graphs.model_runner)
    backend.forced = dense
    try:
        with graphs.model_context(), graphs.backend.replay_session():
            graphs.load_batch(step)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 2)]
            for event in events:
                event.record()
                graphs.backend.replay(graphs._replay_graph_key, step)
            torch.cuda.synchronize()
    finally:
        backend.forced = None
    # The first replay warms up.
    return min(a.elapsed_time(b) for a, b in zip(events[1:], events[2:], strict=False))
