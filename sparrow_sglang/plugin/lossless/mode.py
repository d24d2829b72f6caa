"""Lossless decoding as a mode of the backend."""

from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.lossless import refusals
from sparrow_sglang.plugin.lossless.hooks import HOOKS
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.names import WEIGHTS_FIELD
from sparrow_sglang.plugin.server_log import describe_schedule
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import DRAFTS, BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

_MAX_REQUESTS = 128
"""Default of --max-running-requests, and so of the largest captured batch: a captured round has a
row of logits for each token of each request."""


class Lossless(Mode):
    """Sparse steps draft tokens, and a dense pass verifies them. The model's own schedule reads
    more than pays for drafts, so that "auto" is the one named "drafts"."""

    is_dense = True
    schedule = DRAFTS
    adapter_problem = "lossless decoding applies no adapter: merge it into the weights"
    times_each_schedule = True
    hooks = HOOKS

    def argument_problems(self, server_args: "ServerArgs") -> list[str]:
        return refusals.argument_problems(server_args)

    def model_problems(self, model_config: "ModelConfig") -> list[str]:
        return refusals.model_problems(model_config)

    def set_defaults(self, server_args: "ServerArgs") -> None:
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_REQUESTS

    def describe(self, view: "ServerArgs", schedule: BudgetSchedule, hf_config: Any) -> str:
        # No schedule changes the answers.
        line = describe_schedule(schedule, hf_config, needs_calibration=False)
        if schedule.is_dense:
            return line
        drafts = (view.speculative_num_draft_tokens or 1) - 1
        return f"{line}; lossless, up to {drafts} drafts a round"

    def require_servable(
        self, request: "TokenizedGenerateReqInput", option: RequestOption | None
    ) -> None:
        refusals.require_servable(request, option)

    def prepare_model(self, runner: "ModelRunner") -> None:
        from sparrow_sglang.plugin.lossless.draft_weights import make_draft_weights

        setattr(runner, WEIGHTS_FIELD, make_draft_weights(runner))

    def graph_runner(self) -> type:
        from sparrow_sglang.plugin.lossless.worker import VerifyGraphs

        return VerifyGraphs

    def logits_bytes(self, rows: int, view: "ServerArgs", model_config: "ModelConfig") -> int:
        # Logits of a round, and as much twice while its probabilities are computed, in fp32.
        tokens = view.speculative_num_draft_tokens or 1
        return 3 * 4 * rows * tokens * model_config.vocab_size

    def measure(self, scheduler: "Scheduler") -> int:
        scheduler.model_worker.measure()
        return 0
