"""The algorithm `SPARROW` of SGLang's --speculative-algorithm."""

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sparrow_sglang.plugin.names import BACKEND, DEFAULT_DRAFTS, LOSSLESS, uses_sparrow


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
            raise ValueError(
                f"speculative_num_steps={steps}: expected {width - 1}, one less than"
                " --speculative-num-draft-tokens; set that one alone"
            )
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
