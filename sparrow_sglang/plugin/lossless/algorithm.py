"""The algorithm `SPARROW` of SGLang's --speculative-algorithm."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sparrow_sglang.plugin.lossless.refusals import LOSSLESS
from sparrow_sglang.plugin.refusals import BACKEND, uses_sparrow

DEFAULT_DRAFTS = 8


class SparseDrafts(CustomSpecAlgo):
    """Adds what SGLang calls on an algorithm and `CustomSpecAlgo` lacks."""

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, **needs: bool) -> FutureMap:
        return FutureMap(device, self, req_to_token_pool, **needs)

    def handle_server_args(self, server_args: Any) -> None:
        if not uses_sparrow(server_args):
            raise ValueError(f"speculative_algorithm={LOSSLESS}: set --attention-backend {BACKEND}")
        # SGLang counts the bonus token among the draft tokens.
        width = server_args.speculative_num_draft_tokens or DEFAULT_DRAFTS + 1
        if (steps := server_args.speculative_num_steps) not in (None, width - 1):
            raise ValueError(f"speculative_num_steps={steps}: set --speculative-num-draft-tokens")
        server_args.speculative_num_draft_tokens = width
        server_args.speculative_num_steps = width - 1
        server_args.speculative_eagle_topk = 1


def register() -> None:
    if get_spec(LOSSLESS) is not None:
        return

    @SpeculativeAlgorithm.register(LOSSLESS, supports_overlap=True, spec_class=SparseDrafts)
    def worker(server_args: Any) -> type:
        from sparrow_sglang.plugin.lossless.worker import LosslessWorker

        return LosslessWorker


@dataclass
class RoundState(SpecInput):
    """What a request carries from round to round.

    Attributes:
        bonus_tokens: [B], the latest token of each request, whose KV is not written yet.
        new_seq_lens: [B], tokens whose KV is.
        future_indices: [B], rows of SGLang's relay that hold both while a round is in flight.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    # The relay reads these.
    topk_p: ClassVar[None] = None
    topk_index: ClassVar[None] = None
    hidden_states: ClassVar[None] = None

    def __post_init__(self) -> None:
        # A type that no forward pass runs on.
        super().__init__(SpecInputType.PP_SPEC_RELAY)
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None) -> None:
        for name in self._carried():
            setattr(self, name, getattr(self, name)[new_indices])

    def merge_batch(self, other: "RoundState") -> None:
        for name in self._carried():
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def _carried(self) -> tuple[str, ...]:
        in_flight = self.future_indices is not None
        return ("future_indices",) if in_flight else ("bonus_tokens", "new_seq_lens")
