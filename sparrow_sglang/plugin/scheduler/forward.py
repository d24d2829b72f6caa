"""Forward passes that SGLang has not scheduled: those of a round, and those that are timed."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sparrow_sglang.sglang_compat import versions

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput


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
