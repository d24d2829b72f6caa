"""Decode steps by the stock kernel, as long as no request of the batch leaves a page out. Each
batch size is captured twice, sparse and dense. Where a short sparse step is slower than the dense
one, the schedule's `dense_tokens` is set to the length below which it is: a request decodes densely
by its own length, whatever its batch, so that reports, audit and trainer count by the schedule."""

from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sparrow_sglang.attention_backends.backend import sparrow_backend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

DENSE, SPARSE = "sparrow_dense", "sparrow_sparse"
"""Labels of the variants."""


class _Variants(NamedTuple):
    capture_labels: tuple[str, ...] = (DENSE, SPARSE)


class DecodeGraphs(DecodeCudaGraphRunner):
    """Captures decode steps in two variants."""

    attention_graph_variants: Any = property(lambda self: _Variants(), lambda self, value: None)

    def __init__(self, model_runner: "ModelRunner", **arguments: Any) -> None:
        self._sparrow = sparrow_backend(model_runner)
        super().__init__(model_runner, **arguments)

    def capture_one_shape(self, *arguments: Any) -> None:
        *_, variant = arguments
        self._sparrow.dense_step = variant == DENSE
        super().capture_one_shape(*arguments)

    def _resolve_attention_variant(self, forward_batch: ForwardBatch, *sizes: int) -> str:
        dense = self._sparrow.dense_override
        if dense is None:
            lengths = forward_batch.seq_lens_cpu
            known = lengths is not None and lengths.numel() > 0
            dense = known and self._sparrow.budgets.reads_everything(int(lengths.max()))
        self._sparrow.dense_step = dense
        return DENSE if dense else SPARSE
