"""Times of decode steps and of rounds, taken while no request runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.hf_config import partial_layers
from sparrow_sglang.plugin.scheduler import forward
from sparrow_sglang.plugin.scheduler.graphs import DecodeGraphs

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

TOLERANCE = 1.02
"""A sparse step is slower from this many times the dense one's seconds on."""
_SHORTEST = 1024
_RUNS = 4


def largest_batch(runner: "ModelRunner") -> int:
    """Requests of the largest step that is captured and admitted."""
    return min(runner.decode_cuda_graph_runner.max_bs, runner.req_to_token_pool.size)


def timed_lengths(runner: "ModelRunner", batch: int, longest: int) -> Iterator[int]:
    """Two lengths per octave up to `longest` of which `batch` requests fit into the KV pool. All
    are multiples of 512, and so of the page size."""
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
    `tokens` is one of `timed_lengths`. Yields the rows, [batch] int64."""
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
    """The shortest of a few runs, by the device's clock, after one that warms up."""
    run()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairwise(events)) / 1000


def least_launch_seconds(run: Callable[[], object]) -> float:
    """The shortest of a few runs by the host's clock, which does not wait for the device."""
    seconds = []
    for _ in range(_RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
    batch = min(16, largest_batch(runner))
    lengths = [
        tokens
        for tokens in timed_lengths(runner, batch, model.context_len - 1)
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
    with requests_in_pool(runner, batch, tokens, 1) as rows:
        zeros, positions = torch.zeros_like(rows), torch.full_like(rows, tokens)
        lengths = positions + 1
        step = rows, lengths, lengths.cpu(), zeros, positions, zeros

        def seconds(dense: bool) -> float:
            backend.dense_override = dense
            try:
                return least_seconds(lambda: forward.run(runner, *step))
            finally:
                backend.dense_override = None

        return seconds(dense=False) / seconds(dense=True)
