"""Arguments, models and fields of requests that lossless decoding refuses."""

import os
from typing import TYPE_CHECKING

from sparrow_sglang.hf_config import LINEAR, WINDOW, layer_types_of, window_layers
from sparrow_sglang.json_values import quoted
from sparrow_sglang.mismatch.exact_rates import RECORD_VARIABLE
from sparrow_sglang.plugin.names import DRAFT_WEIGHTS, LOSSLESS, MAX_DRAFT_TOKENS, WEIGHTS_FIELD
from sparrow_sglang.schedules.options import RequestError, RequestOption
from sparrow_sglang.sglang_compat.install import LOCKED, installed_version

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.server_args import ServerArgs

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


def argument_problems(server_args: "ServerArgs") -> list[str]:
    """One sentence for each argument that lossless decoding does not run with, or not without."""
    field = f"speculative_algorithm={LOSSLESS!r}"
    if installed_version() != LOCKED:
        return [f"{field}: it is fitted to SGLang {LOCKED}, not to {installed_version()}"]
    problems = [
        f"{field} with {name}={getattr(server_args, name)!r}: {why};"
        f" remove --{name.replace('_', '-')}"
        for name, (neutral, why) in _ARGUMENTS.items()
        if (getattr(server_args, name, None) or neutral) != neutral
    ]
    if RECORD_VARIABLE in os.environ:
        problems.append(f"{field} with {RECORD_VARIABLE} set: drafts are not recorded; unset it")
    tokens, weights = server_args.speculative_num_draft_tokens, getattr(server_args, WEIGHTS_FIELD)
    if weights not in DRAFT_WEIGHTS:
        problems.append(f"{WEIGHTS_FIELD}={quoted(weights)}: expected {', '.join(DRAFT_WEIGHTS)}")
    if tokens is not None and not 2 <= tokens <= MAX_DRAFT_TOKENS:
        problems.append(
            f"speculative_num_draft_tokens={tokens}: expected 2 to {MAX_DRAFT_TOKENS}, the bonus"
            " token included; 9 is the default"
        )
    return problems


def model_problems(model_config: "ModelConfig") -> list[str]:
    """Properties of the model that lossless decoding does not serve."""
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


def require_servable(request: "TokenizedGenerateReqInput", option: RequestOption | None) -> None:
    """Raise `RequestError` if the request has a field that a round would not honour exactly."""
    if option is not None and option.report:
        raise RequestError("report=true with lossless decoding: tokens are dense; expected false")
    for name, neutral in _FIELDS.items():
        value = getattr(request.sampling_params, name, getattr(request, name, None))
        if value is not None and value not in (neutral, {}):
            hint = "; --sampling-defaults openai ignores generation_config.json"
            raise RequestError(
                f"{name}={quoted(value)}: expected {neutral!r} with lossless decoding, whose"
                f" rounds do not apply it{hint if name.endswith('_penalty') else ''}"
            )
