"""What a server does with sparse decode steps: this class for tokens that are decoded sparsely, and
`lossless.mode.Lossless` for drafts that a dense pass verifies. Whatever differs between the two is
a member here; `lossless.mode.mode_of` returns the mode of a server."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.names import LOOKUPS_FIELD, LOSSLESS, WEIGHTS_FIELD
from sparrow_sglang.plugin.scheduler_calls import gather_tp
from sparrow_sglang.plugin.server_log import describe_schedule
from sparrow_sglang.plugin.state import Hook
from sparrow_sglang.schedules.names import AUTO
from sparrow_sglang.schedules.options import DraftUsage, KvUsage, RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

# Arguments of lossless decoding, with their defaults.
_OF_LOSSLESS = {"speculative_num_draft_tokens": None, WEIGHTS_FIELD: AUTO, LOOKUPS_FIELD: False}


class Mode:
    """Tokens are decoded sparsely.

    Attributes:
        is_dense: whether tokens, and the KV that decode leaves, are those of dense decode.
        schedule: of a server whose --sparrow-schedule is "auto".
        adapter_problem: why no adapter can be loaded while the server runs, if so.
        hooks: of schedulers in this mode, besides those of the table.
        times_each_schedule: whether `measure` depends on budgets, and is repeated for new ones.
    """

    is_dense = False
    schedule = AUTO
    adapter_problem: str | None = None
    times_each_schedule = False
    hooks: tuple[Hook, ...] = ()

    def argument_problems(self, server_args: "ServerArgs") -> list[str]:
        """One sentence for each argument with which this mode does not run."""
        if server_args.speculative_algorithm:
            return []
        return [
            f"{name}={value!r}: expected only with --speculative-algorithm {LOSSLESS}"
            for name, default in _OF_LOSSLESS.items()
            if (value := getattr(server_args, name)) != default
        ]

    def model_problems(self, model_config: "ModelConfig") -> list[str]:
        """One sentence for each property of the model that this mode does not serve, among those
        that the backend serves."""
        return []

    def set_defaults(self, server_args: "ServerArgs") -> None:
        """Set arguments that the user left open, before SGLang does."""

    def describe(self, view: "ServerArgs", schedule: BudgetSchedule, hf_config: Any) -> str:
        """One line for the log on decode with `schedule`, by resolved arguments."""
        return describe_schedule(schedule, hf_config)

    def require_servable(
        self, request: "TokenizedGenerateReqInput", option: RequestOption | None
    ) -> None:
        """Raise `RequestError` if the request has a field that this mode would not honour."""

    def usage(
        self, option: RequestOption, meta: Mapping[str, Any], retracted: list[int]
    ) -> KvUsage | DraftUsage:
        """The report of a request by the `meta_info` of its last answer, and the tokens that it had
        at each retraction."""
        # The answer to a request that was aborted before it ran has no token counts.
        prompt, completion = meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0)
        return option.usage(prompt, completion, retracted)

    def prepare_model(self, runner: "ModelRunner") -> None:
        """Add what this mode keeps beside a model's weights, which have just been loaded."""

    def graph_runner(self) -> type:
        """The class that captures the decode steps of a GPU."""
        from sparrow_sglang.plugin.scheduler.graphs import DecodeGraphs

        return DecodeGraphs

    def round_bytes(self, rows: int, view: "ServerArgs", model_config: "ModelConfig") -> int:
        """Bytes of GPU memory for decode of `rows` requests, beyond those that SGLang counts."""
        return 0

    def measure(self, scheduler: "Scheduler") -> int:
        """Time decode, while no request runs, and choose by it. Returns the tokens up to which
        decode should be dense, the same on all ranks."""
        from sparrow_sglang.plugin.scheduler.timing import measure_dense_tokens

        tokens = measure_dense_tokens(scheduler.tp_worker.model_runner)
        return int(gather_tp(scheduler, tokens)[0])
