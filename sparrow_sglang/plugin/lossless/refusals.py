"""Arguments, models and fields of requests that lossless decoding refuses."""

import os
from typing import TYPE_CHECKING

from sparrow_sglang.hf_config import LINEAR, WINDOW, layer_types_of, window_layers
from sparrow_sglang.json_values import quoted
from sparrow_sglang.mismatch.exact_rates import RECORD_VARIABLE
from sparrow_sglang.schedules.options import RequestError, RequestOption
from sparrow_sglang.sglang_compat.install import LOCKED, installed_version
from sparrow_sglang.sglang_compat.versions import LOSSLESS_NEEDS, resolve_target

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.server_args import ServerArgs

LOSSLESS = "SPARROW"
"""Name of the algorithm in SGLang's --speculative-algorithm."""
FORCED_ACCEPTANCE = "SPARROW_FORCED_ACCEPTANCE"
"""Variable by which benchmarks of random weights set the share of accepted drafts, 0 to 1."""
DEFAULT_DRAFTS = 8
MAX_DRAFT_TOKENS = 33
MAX_REQUESTS = 128
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


def is_lossless(server_args: "ServerArgs") -> bool:
    # SGLang accepts the name in lower case, too.
    return (server_args.speculative_algorithm or "").upper() == LOSSLESS


def describe_lossless(view: "ServerArgs") -> str:
    """A log's description of lossless decoding, by resolved arguments; empty for other servers."""
    if not is_lossless(view):
        return ""
    return f"lossless, up to {view.speculative_num_draft_tokens - 1} drafts a round"


def lossless_argument_problems(server_args: "ServerArgs") -> list[str]:
    """One sentence for each argument that lossless decoding does not run with, or not without."""
    tokens = server_args.speculative_num_draft_tokens
    if not is_lossless(server_args):
        alone = tokens is not None and not server_args.speculative_algorithm
        problem = f"speculative_num_draft_tokens={tokens}: expected with --speculative-algorithm"
        return [problem] if alone else []
    field = f"speculative_algorithm={LOSSLESS!r}"
    if missing := [name for name in LOSSLESS_NEEDS if resolve_target(name) is None]:
        needed = f"pip install sglang=={LOCKED}"
        return [f"{field}: SGLang {installed_version()} has no {' nor '.join(missing)}; {needed}"]
    problems = [
        f"{field} with {name}={getattr(server_args, name)!r}: {why};"
        f" remove --{name.replace('_', '-')}"
        for name, (neutral, why) in _ARGUMENTS.items()
        if (getattr(server_args, name, None) or neutral) != neutral
    ]
    if RECORD_VARIABLE in os.environ:
        problems.append(f"{field} with {RECORD_VARIABLE} set: drafts are not recorded; unset it")
    if tokens is not None and not 2 <= tokens <= MAX_DRAFT_TOKENS:
        problems.append(
            f"speculative_num_draft_tokens={tokens}: expected 2 to {MAX_DRAFT_TOKENS}, the bonus"
            " token included; 9 is the default"
        )
    return problems


def lossless_model_problems(server_args: "ServerArgs", model_config: "ModelConfig") -> list[str]:
    """Properties of the model that lossless decoding does not serve."""
    if not is_lossless(server_args):
        return []
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


def require_lossless(request: "TokenizedGenerateReqInput", option: RequestOption | None) -> None:
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
