"""Lossless decoding as a mode of the backend."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparrow_sglang.hf_config import LINEAR, WINDOW, layer_types_of, window_layers
from sparrow_sglang.json_values import quoted
from sparrow_sglang.mismatch.exact_rates import RECORD_VARIABLE
from sparrow_sglang.plugin.lossless.hooks import HOOKS
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.names import DRAFT_WEIGHTS, LOSSLESS, MAX_DRAFT_TOKENS, WEIGHTS_FIELD
from sparrow_sglang.plugin.server_log import describe_schedule
from sparrow_sglang.schedules.options import DraftUsage, RequestError, RequestOption
from sparrow_sglang.schedules.schedule import DRAFTS, BudgetSchedule
from sparrow_sglang.sglang_compat.versions import (
    LOCKED,
    LOSSLESS_NEEDS,
    installed_version,
    resolve_target,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

_MAX_REQUESTS = 128
"""Default of --max-running-requests, and so of the largest captured batch: a captured round has a
row of logits for each token of each request."""
_ARGUMENTS = {
    "pp_size": (1, "drafts are not passed between pipeline stages"),
    "enable_dp_attention": (False, "idle ranks would have to draft"),
    **dict.fromkeys(("enable_lora", "lora_paths"), (None, "merge adapters into the weights")),
    "enable_strict_thinking": (False, "a round applies no grammar"),
    "speculative_eagle_topk": (1, "drafts are a chain"),
    "speculative_draft_model_path": (None, "the model drafts itself"),
    "sparrow_audit_rate": (0, "returned tokens have no mismatch; see sparrow:accepted_drafts"),
    "enable_deterministic_inference": (False, "drafts take no seed"),
    "enable_return_hidden_states": (False, "a round keeps none"),
}

# Fields of a request or its sampling parameters, with their neutral values.
_FIELDS = {
    **{"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0},
    **dict.fromkeys(("logit_bias", "beam_width", "watermark", "custom_logit_processor", "lora_id")),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag")),
    **dict.fromkeys(("return_hidden_states", "return_sampling_mask", "return_entropy"), False),
}


def captures_decode(view: "ServerArgs") -> bool:
    """Whether a server by these resolved arguments has CUDA graphs of decode. Without them rounds
    are not timed, and draft nothing."""
    return view.device == "cuda" and view.cuda_graph_config.decode.backend != "disabled"


class Lossless(Mode):
    """Sparse steps draft tokens, and a dense pass verifies them. The model's own schedule reads
    more than pays for drafts, so that "auto" is the one named "drafts"."""

    is_dense = True
    schedule = DRAFTS
    adapter_problem = "lossless decoding applies no adapter: merge it into the weights"
    times_each_schedule = True
    hooks = HOOKS

    def argument_problems(self, server_args: "ServerArgs") -> list[str]:
        field = f"speculative_algorithm={LOSSLESS!r}"
        if missing := [name for name in LOSSLESS_NEEDS if resolve_target(name) is None]:
            needed = f"pip install sglang=={LOCKED}"
            return [
                f"{field}: SGLang {installed_version()} has no {' nor '.join(missing)}; {needed}"
            ]
        problems = [
            f"{field} with {name}={getattr(server_args, name)!r}: {why};"
            f" remove --{name.replace('_', '-')}"
            for name, (neutral, why) in _ARGUMENTS.items()
            if (getattr(server_args, name, None) or neutral) != neutral
        ]
        if RECORD_VARIABLE in os.environ:
            problems.append(
                f"{field} with {RECORD_VARIABLE} set: drafts are not recorded; unset it"
            )
        weights = getattr(server_args, WEIGHTS_FIELD)
        if weights not in DRAFT_WEIGHTS:
            problems.append(
                f"{WEIGHTS_FIELD}={quoted(weights)}: expected {', '.join(DRAFT_WEIGHTS)}"
            )
        tokens = server_args.speculative_num_draft_tokens
        if tokens is not None and not 2 <= tokens <= MAX_DRAFT_TOKENS:
            problems.append(
                f"speculative_num_draft_tokens={tokens}: expected 2 to {MAX_DRAFT_TOKENS}, the"
                " bonus token included; 9 is the default"
            )
        return problems + _expert_problems(server_args)

    def model_problems(self, model_config: "ModelConfig") -> list[str]:
        text = model_config.hf_text_config
        kinds = set(map(str, layer_types_of(text)))
        properties = {
            "sliding windows": WINDOW in kinds or bool(window_layers(text)),
            "linear attention, whose states a rejected draft would change": LINEAR in kinds,
            "images or audio": model_config.is_multimodal,
        }
        return [
            f"speculative_algorithm={LOSSLESS!r} with a model with {what}: not supported; remove"
            " --speculative-algorithm"
            for what, present in properties.items()
            if present
        ]

    def set_defaults(self, server_args: "ServerArgs") -> None:
        # Whoever launches an engine's processes, as verl does, resolves arguments before SGLang
        # loads its plugins.
        from sparrow_sglang.plugin.lossless import algorithm

        algorithm.register()
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_REQUESTS

    def describe(self, view: "ServerArgs", schedule: BudgetSchedule, hf_config: Any) -> str:
        # No schedule changes the answers.
        line = describe_schedule(schedule, hf_config, needs_calibration=False)
        if schedule.is_dense:
            return line
        if not captures_decode(view):
            return f"{line}; lossless, without CUDA graphs: nothing is drafted, all steps are dense"
        drafts = (view.speculative_num_draft_tokens or 1) - 1
        return f"{line}; lossless, up to {drafts} drafts a round"

    def require_servable(
        self, request: "TokenizedGenerateReqInput", option: RequestOption | None
    ) -> None:
        for name, neutral in _FIELDS.items():
            value = getattr(request.sampling_params, name, getattr(request, name, None))
            if value is not None and value not in (neutral, {}):
                hint = "; --sampling-defaults openai ignores generation_config.json"
                raise RequestError(
                    f"{name}={quoted(value)}: expected {neutral!r} with lossless decoding, whose"
                    f" rounds do not apply it{hint if name.endswith('_penalty') else ''}"
                )

    def usage(
        self, option: RequestOption, meta: Mapping[str, Any], retracted: list[int]
    ) -> DraftUsage:
        rounds = meta.get("spec_verify_ct", 0)
        return DraftUsage(
            schedule=None if option.schedule is None else option.schedule.name,
            kv_budget_tokens=option.kv_budget_tokens,
            rounds=rounds,
            drafts=round(meta.get("spec_cap_length", 0) * rounds),
            accepted_drafts=meta.get("spec_num_correct_drafts", 0),
        )

    def prepare_model(self, runner: "ModelRunner") -> None:
        from sparrow_sglang.plugin.lossless.draft_weights import make_draft_weights

        setattr(runner, WEIGHTS_FIELD, make_draft_weights(runner))

    def graph_runner(self) -> type:
        from sparrow_sglang.plugin.lossless.passes import VerifyGraphs

        return VerifyGraphs

    def round_bytes(self, rows: int, view: "ServerArgs", model_config: "ModelConfig") -> int:
        from sparrow_sglang.plugin.lossless.lookups import Histories

        # Logits of a round, and as much twice while its probabilities are computed, in fp32.
        tokens = view.speculative_num_draft_tokens or 1
        requests = max(rows, view.max_running_requests or 0)
        histories = Histories.num_bytes(requests, model_config.context_len + 2 * tokens)
        return 3 * 4 * rows * tokens * model_config.vocab_size + histories

    def measure(self, scheduler: "Scheduler") -> int:
        scheduler.model_worker.measure()
        return 0


def _expert_problems(server_args: "ServerArgs") -> list[str]:
    """SGLang's buffer for the experts of a pass has no rows for the drafts of each request."""
    requests, tokens, chunk = (
        getattr(server_args, name)
        for name in ("max_running_requests", "speculative_num_draft_tokens", "chunked_prefill_size")
    )
    rows = (requests or 0) * (tokens or 0)
    if not getattr(server_args, "enable_return_routed_experts", False) or rows <= (chunk or rows):
        return []
    return [
        f"enable_return_routed_experts with chunked_prefill_size={chunk}: a round of {requests}"
        f" requests has {rows} rows ({tokens} draft tokens each); pass --chunked-prefill-size"
        f" {rows}, or fewer --max-running-requests"
    ]


_SPARSE, _LOSSLESS = Mode(), Lossless()


def mode_of(server_args: "ServerArgs") -> Mode:
    """The mode of a server with this backend."""
    # SGLang accepts the name in lower case, too.
    is_lossless = (server_args.speculative_algorithm or "").upper() == LOSSLESS
    return _LOSSLESS if is_lossless else _SPARSE
