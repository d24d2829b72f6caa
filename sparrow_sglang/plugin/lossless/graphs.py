"""CUDA graphs of a round: one set of verifications, which SGLang captures, and one of drafts."""

from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

if TYPE_CHECKING:
    import torch


def verify_input(width: int, positions: "torch.Tensor") -> DFlashVerifyInput:
    """What SGLang's attention backends read of a verification of `width` tokens in sequence."""
    return DFlashVerifyInput(
        draft_token=None,
        positions=positions,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


class VerifyGraphs(DecodeCudaGraphRunner):
    """Captures verifications; SGLang itself would not know their `spec_info`."""

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        return verify_input(self.captured_req_width, self.buffers.positions[:num_tokens])

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        # SGLang compares widths only where there is a `spec_info`, which a draft has not. Replayed
        # as a verification, it would write KV to stale slots.
        verifies = forward_batch.forward_mode.is_target_verify()
        return verifies and bool(super().can_run_graph(forward_batch))


def capture_drafts(model_runner: Any) -> DecodeCudaGraphRunner | None:
    """Graphs of sparse decode steps; None where SGLang captures nothing."""
    if model_runner.decode_cuda_graph_runner is None:
        return None
    algorithm = model_runner.spec_algorithm
    model_runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        return DecodeCudaGraphRunner(model_runner)
    finally:
        model_runner.spec_algorithm = algorithm
