"""Passes that SGLang has not scheduled: those of a lossless round, and those that are timed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.sglang_compat import versions

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

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


def verify_input(width: int, positions: torch.Tensor) -> Any:
    """What SGLang's attention backends read of a verification of `width` tokens in sequence."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput(
        draft_token=None,
        positions=positions,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def run(
    runner: "ModelRunner",
    rows: torch.Tensor,
    lengths: torch.Tensor,
    lengths_cpu: torch.Tensor | None,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> "ModelRunnerOutput":
    """Run a decode step, or a verification of `width` tokens each, without sampling.

    Args:
        rows: [B], of the token table.
        lengths: [B], those of the requests with the new token, or without those to verify.
        lengths_cpu: the same on the host, unless the dense side needs none there.
        tokens, positions, slots: [B], or [B * width], of the new tokens.
    """
    width = len(tokens) // len(rows)
    verifies = width > 1
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if verifies else ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=tokens,
        req_pool_indices=rows,
        seq_lens=lengths,
        out_cache_loc=slots,
        seq_lens_sum=None,
        orig_seq_lens=lengths,
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=verify_input(width, positions) if verifies else None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    if lengths_cpu is not None:
        # FlashInfer plans a verification by lengths with, and the sum without its tokens.
        forward_batch.seq_lens_sum = int(lengths_cpu.sum())
        forward_batch.seq_lens_cpu = lengths_cpu + (width if verifies else 0)
    versions.bind_slots(runner, forward_batch)
    return runner.forward(forward_batch)
