"""The passes of a round over the served model: sparse and dense steps, verifications, each by the
CUDA graphs that are captured for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sparrow_sglang.attention_backends.backend import sparrow_backend
from sparrow_sglang.planning.rounds import widths
from sparrow_sglang.plugin.lossless.draft_weights import DraftWeights
from sparrow_sglang.plugin.names import WEIGHTS_FIELD
from sparrow_sglang.plugin.scheduler import forward
from sparrow_sglang.plugin.scheduler.graphs import SPARSE, DecodeGraphs

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class VerifyGraphs(DecodeCudaGraphRunner):
    """Captures verifications, whose `spec_info` SGLang does not know."""

    def get_spec_info(self, num_tokens: int) -> Any:
        return forward.verify_input(self.captured_req_width, self.buffers.positions[:num_tokens])

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        # SGLang compares widths only where there is a `spec_info`, which a draft has not. Replayed
        # as a verification, it would write KV to stale slots.
        verifies = forward_batch.forward_mode.is_target_verify()
        return verifies and bool(super().can_run_graph(forward_batch))


class StepGraphs(DecodeGraphs):
    """Captures dense steps with the model's weights, and drafts with `weights`."""

    def __init__(self, runner: Any, weights: DraftWeights) -> None:
        self._weights = weights
        super().__init__(runner)

    def capture_one_shape(self, *arguments: Any) -> None:
        *_, variant = arguments
        with self._weights.in_use(variant == SPARSE):
            super().capture_one_shape(*arguments)


class Passes:
    """The passes of rounds that verify up to `width` rows.

    Attributes:
        runner: of the served model.
        weights: with which sparse steps draft.
    """

    def __init__(self, runner: "ModelRunner", width: int) -> None:
        self.runner = runner
        self.weights: DraftWeights = getattr(runner, WEIGHTS_FIELD)
        self.context_len = runner.model_config.context_len
        self.vocab_size = runner.model_config.vocab_size
        self._width = width
        self._step_graphs: Any = None
        self._verify_graphs: dict[int, Any] = {}

    @property
    def captured(self) -> bool:
        return self._step_graphs is not None

    def capture(self) -> None:
        """Capture steps, and the verifications that SGLang has not, if graphs are on."""
        runner, narrow = self.runner, widths(self._width)[:-1]
        for width in narrow:
            sparrow_backend(runner).add_verification(runner, width)
        if runner.decode_cuda_graph_runner is None:
            return
        self._verify_graphs[self._width] = runner.decode_cuda_graph_runner
        for width in narrow:
            self._verify_graphs[width] = VerifyGraphs(runner, speculative_num_draft_tokens=width)
        algorithm, runner.spec_algorithm = runner.spec_algorithm, SpeculativeAlgorithm.NONE
        try:
            self._step_graphs = StepGraphs(runner, self.weights)
        finally:
            runner.spec_algorithm = algorithm

    @property
    def token_table(self) -> torch.Tensor:
        """Slots of the KV pool by row and position."""
        return self.runner.req_to_token_pool.req_to_token

    @contextmanager
    def verification(self, width: int) -> Iterator[None]:
        """Within, passes verify `width` rows of each request."""
        with self._graphs(self._verify_graphs.get(width)):
            yield

    @contextmanager
    def steps(self, dense: bool) -> Iterator[None]:
        """Within, passes are drafts, or `dense` steps."""
        runner, backend = self.runner, sparrow_backend(self.runner)
        # Drafts with the model's weights are dense steps where the budget covers the context.
        backend.dense_override = True if dense else False if self.weights.copies else None
        try:
            with self._graphs(self._step_graphs), self.weights.in_use(not dense):
                yield
        finally:
            backend.dense_override = None
            # A verification without a graph sets no event of its own. With that of the last draft
            # the scheduler would change the token table while the verification reads it.
            if not dense:
                runner.shared_read_done_event = None

    @contextmanager
    def _graphs(self, graphs: Any) -> Iterator[None]:
        before = self.runner.decode_cuda_graph_runner
        self.runner.decode_cuda_graph_runner = graphs
        try:
            yield
        finally:
            self.runner.decode_cuda_graph_runner = before

    def of_first_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of rank 0: logits of ranks may differ by rounding, and samples do."""
        group = get_parallel().tp_group
        if group.world_size > 1:
            tensor = tensor.contiguous()
            group.broadcast(tensor, src=0)
        return tensor
