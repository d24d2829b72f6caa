"""Arguments and models that the backend refuses, because it would decode wrongly. One sentence per
problem names field, value, reason and remedy."""

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow_sglang.attention_backends.dense_side import DENSE_FIELD, dense_problems
from sparrow_sglang.attention_backends.kernel_limits import fp8_problems, kernel_problems
from sparrow_sglang.hf_config import (
    FULL,
    LINEAR,
    WINDOW,
    layer_types_of,
    linear_layers,
    num_layers_of,
    window_layers,
)
from sparrow_sglang.plugin.arguments.layer_refusals import layer_problems
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.names import BACKEND, LOSSLESS
from sparrow_sglang.schedules.schedule import PAGE_SIZES, BudgetSchedule
from sparrow_sglang.sglang_compat.arguments import attention_backends, attention_tp_size, resolved
from sparrow_sglang.sglang_compat.versions import (
    LOCKED,
    decode_may_become_prefill,
    hybrid_config,
    installed_version,
    version_problems,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

_PAST_THE_BACKEND = "KV would enter the pool without passing the backend, so landmarks go stale"
_NO_CHECKS = "request options would not be validated, nor what was read reported"
_NO_BACKEND = "one kernel would decode densely, past the attention backend"
_OTHER_LAYOUT = "the backend reads SGLang's own token pool in NHD layout"
_NOT_SHOWN = "not tested"
_DECODE_AS_PREFILL = (
    "SGLang would turn a decode step into a prefill of one token each while another rank prefills,"
    " which would be dense decode"
)
# Supported models with linear attention in some layers.
_LINEAR_MODELS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Fields of a config with a sparse attention that the model was trained with.
_OWN_SPARSITY = re.compile(r"sparse_(config|attention|attn)|^index_topk$")


class _Refusal(NamedTuple):
    field: str
    refused: Callable[[Any], bool]
    why: str
    allowed: str | None = None
    """Value to pass; None to leave the flag out."""


# Flags that must be unset, by the reason.
_FLAGS = {
    f"HiCache: {_PAST_THE_BACKEND}": ("enable_hierarchical_cache", "hicache_storage_backend"),
    _PAST_THE_BACKEND: ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
    "decode tokens of a mixed batch would be decoded densely": ("enable_mixed_chunk",),
    _OTHER_LAYOUT: (
        "enable_unified_memory",
        "enable_page_major_kv_layout",
        "enable_kv_cache_sharding",
    ),
    _NO_BACKEND: ("enable_nvidia_megakernel", "enable_amd_monokernel"),
    "another sparse attention would own the KV pool": ("enable_hisparse",),
    "one decode plan is held at a time": ("enable_two_batch_overlap", "enable_pdmux"),
    f"it would compile kernels that write landmarks in place; {_NOT_SHOWN}": (
        "enable_torch_compile",
    ),
    "a diffusion model does not decode token by token": ("dllm_algorithm",),
    "a session would keep sparsely written KV as its prefix": ("enable_streaming_session",),
    "SGLang's Ray schedulers load no plugins": ("use_ray",),
    _NO_CHECKS: ("smg_grpc_mode", "grpc_mode", "grpc_port", "sidecar"),
    _NOT_SHOWN: ("radix_cache_backend", "enable_linear_replayssm", "enable_int8_mamba_checkpoint"),
}
_REFUSALS = (
    *(_Refusal(field, bool, why) for why, fields in _FLAGS.items() for field in fields),
    *(
        _Refusal(field, lambda size: size is not None and size < 1, "expected 1 or more", "1")
        for field in ("tp_size", "dp_size", "pp_size", "ep_size", "max_running_requests")
    ),
    _Refusal(
        "page_size",
        lambda size: size is not None and size not in PAGE_SIZES,
        f"expected one of {PAGE_SIZES}",
        "16",
    ),
    _Refusal(
        "speculative_algorithm",
        lambda name: name is not None and name.upper() != LOSSLESS,
        "verification decodes several tokens at once, densely",
        LOSSLESS,
    ),
    _Refusal(
        "disaggregation_mode",
        lambda mode: mode != "null",
        f"prefill-decode disaggregation: {_PAST_THE_BACKEND}",
    ),
    _Refusal(
        "mamba_radix_cache_strategy",
        lambda strategy: strategy == "extra_buffer_lazy",
        f"states of linear attention that are kept late: {_NOT_SHOWN}",
        "auto",
    ),
    _Refusal("moe_a2a_backend", lambda backend: backend == "pplx", _DECODE_AS_PREFILL, "another"),
    _Refusal(
        "tokenizer_worker_num",
        lambda workers: workers > 1,
        f"SGLang's tokenizer workers load no plugins: {_NO_CHECKS}",
        "1",
    ),
    _Refusal("sparrow_audit_rate", lambda rate: not 0 <= rate <= 1, "expected 0 to 1", "0.01"),
    _Refusal(
        "model_impl",
        lambda value: value == "transformers",
        "its attention layers cannot be checked, and some lose windows or sinks",
        "sglang",
    ),
    *(
        _Refusal(field, lambda size: size > 1, "KV is split by position", "1")
        for field in ("dcp_size", "attn_cp_size")
    ),
    _Refusal(
        "kv_cache_dtype",
        lambda dtype: dtype not in ("auto", "bf16", "bfloat16", "fp8_e4m3"),
        "the kernels read KV in 16 bits or in FP8 e4m3 with one scale per layer",
        "auto or fp8_e4m3",
    ),
)
_ENVIRONMENT = {
    "SGLANG_RUST_SERVER": f"it replaces SGLang's tokenizer manager: {_NO_CHECKS}",
    "SGLANG_USE_HND_KVCACHE": _OTHER_LAYOUT,
    "SGLANG_DEEPEP_V2_FORCE_MAX_LEN": _DECODE_AS_PREFILL,
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "landmarks are sized before graphs are captured",
}


def server_problems(server_args: "ServerArgs") -> list[str]:
    """Problems that the arguments alone show; works before and after SGLang resolves them."""
    # Without a supported SGLang the fields that are checked here may not exist.
    if wrong_version := version_problems():
        return wrong_version
    from sglang.srt.environ import envs

    problems = []
    prefill, decode = attention_backends(server_args)
    if BACKEND not in (prefill, decode):
        problems.append(
            f"attention backend {decode!r}: SGLang has replaced {BACKEND!r} by it, and would decode"
            f" densely; serve another model, or pass --attention-backend {decode}"
        )
    elif prefill != decode:
        problems.append(
            f"prefill attention backend {prefill!r}, decode attention backend {decode!r}: prefill"
            f" writes the landmarks that decode reads; pass only --attention-backend {BACKEND}"
        )
    for refusal in _REFUSALS:
        if not hasattr(server_args, refusal.field):
            # This version has no such feature.
            continue
        # 0.5.15 gives every server this port, and opens it only with SGLANG_ENABLE_GRPC.
        if refusal.field == "grpc_port" and not getattr(server_args, "enable_grpc", True):
            continue
        value = getattr(server_args, refusal.field)
        if refusal.refused(value):
            flag = f"--{refusal.field.replace('_', '-')}"
            fix = f"pass {flag} {refusal.allowed}" if refusal.allowed else f"remove {flag}"
            problems.append(f"{refusal.field}={value!r}: {refusal.why}; {fix}")
    problems += mode_of(server_args).argument_problems(server_args)
    problems += _audit_problems(server_args)
    # A string or a mapping until SGLang has parsed it; neither has the attribute.
    graphs = getattr(server_args.cuda_graph_config, "prefill", None)
    backend = getattr(graphs, "backend", None)
    if backend == "full":
        problems.append(
            "cuda_graph_config[prefill].backend='full': landmarks are written outside the graph;"
            " pass --cuda-graph-backend-prefill breakable"
        )
    if (
        backend == "breakable"
        and server_args.tp_size > attention_tp_size(server_args) * server_args.attn_cp_size
        and decode_may_become_prefill()
    ):
        problems.append(
            f"CUDA graphs of a prefill with enable_dp_attention: {_DECODE_AS_PREFILL}; pass"
            " --disable-prefill-cuda-graph"
        )
    for variable, why in _ENVIRONMENT.items():
        if hasattr(envs, variable) and getattr(envs, variable).get():
            problems.append(f"{variable}=1: {why}; unset it")
    return problems


def _audit_problems(server_args: "ServerArgs") -> list[str]:
    problems = []
    audited = server_args.sparrow_audit_rate
    if audited and not server_args.enable_metrics:
        problems.append(
            "enable_metrics=False with --sparrow-audit-rate: nothing would show what it measures;"
            " pass --enable-metrics"
        )
    if audited and server_args.pp_size > 1:
        problems.append(
            f"pp_size={server_args.pp_size} with --sparrow-audit-rate: SGLang does not return what"
            " the last stage measures; pass --sparrow-audit-rate 0"
        )
    if audited and server_args.enable_dp_attention and not server_args.enable_dp_lm_head:
        problems.append(
            "enable_dp_attention with --sparrow-audit-rate: a replica computes no logits alone;"
            " pass --enable-dp-lm-head"
        )
    return problems


def model_problems(model_config: "ModelConfig") -> list[str]:
    """Properties of the model, by its config as SGLang reads it, that the backend cannot serve."""
    text = model_config.hf_text_config
    fields = vars(model_config.hf_config) | vars(text)
    own_sparsity = [name for name in fields if _OWN_SPARSITY.search(name) and fields[name]]
    kinds = set(map(str, layer_types_of(text)))
    other_kinds = sorted(kinds - {FULL, WINDOW, LINEAR})
    listed = f" (layer_types: {', '.join(other_kinds)})" if other_kinds else ""
    model = " ".join(model_config.hf_config.architectures or ["this model"])
    is_known = bool(set(_LINEAR_MODELS).intersection(model_config.hf_config.architectures or ()))
    if is_known and getattr(text, "full_attention_interval", None) is None:
        return [
            f"model {model}: config.json has no full_attention_interval, which SGLang needs and"
            ' transformers leaves out; add it, such as "full_attention_interval": 4'
        ]
    hybrid = hybrid_config(model_config)
    # SGLang and this package must agree on which layers are linear.
    is_linear = (
        is_known
        and hybrid is not None
        and {*hybrid.full_attention_layer_ids}
        == {*range(num_layers_of(text))}.difference(linear_layers(text))
    )
    properties = {
        "multi-head latent attention (MLA): there are no keys per head": (
            model_config.attention_arch.name == "MLA"
        ),
        "hybrid attention: some of its layers keep something else than KV, a sliding window or the"
        f" state of linear attention as in Qwen3-Next and Qwen3.5{listed}": (
            bool(other_kinds)
            or model_config.attention_chunk_size is not None
            or ((hybrid is not None or LINEAR in kinds) and not is_linear)
        ),
        f"linear attention in SGLang {installed_version()}: fitted to {LOCKED}": (
            is_linear and installed_version() != LOCKED
        ),
        "linear attention on a CPU: SGLang has only GPU kernels for it, which TRITON_INTERPRET=1"
        " would interpret far too slowly": is_linear and _lacks_triton(),
        "sliding windows in a KV pool of their own, for other layers or heads than the config"
        " names": model_config.is_hybrid_swa and _has_other_windows(model_config),
        f"sliding windows in a KV pool of their own on a CPU before SGLang {LOCKED}": (
            model_config.is_hybrid_swa and _lacks_triton() and installed_version() != LOCKED
        ),
        "sliding windows in all layers: none keeps the whole KV": kinds == {WINDOW},
        "encoder-decoder: cross-attention has no budget": model_config.is_encoder_decoder,
        "not a generative model: nothing is decoded": not model_config.is_generation,
        "keys and values of different width": getattr(model_config, "has_asymmetric_kv", False),
        "soft-capped attention scores": bool(getattr(text, "attn_logit_softcapping", None)),
        "dual chunk attention": getattr(text, "dual_chunk_attention_config", None) is not None,
        f"sparse attention of its own ({', '.join(own_sparsity)})": bool(own_sparsity),
    }
    return [
        f"model {model}: {what}; choose another --attention-backend for it"
        for what, present in properties.items()
        if present
    ]


def rank_problems(server_args: "ServerArgs", model_config: "ModelConfig") -> list[str]:
    """Heads or experts that the ranks cannot share, which SGLang asserts without a message."""
    text = model_config.hf_text_config
    heads = {
        "query heads": model_config.num_attention_heads,
        "KV heads": model_config.get_total_num_kv_heads(),
    }
    if LINEAR in layer_types_of(text):
        heads["key heads of linear attention"] = text.linear_num_key_heads

    def can_split(ranks: int) -> bool:
        # KV heads are repeated where there are more ranks than heads.
        repeated = ranks % heads["KV heads"] == 0
        return all(
            count % ranks == 0 or (name == "KV heads" and repeated) for name, count in heads.items()
        )

    view, ranks = resolved(server_args), attention_tp_size(server_args)
    model = "model " + " ".join(model_config.hf_config.architectures or ["of unknown kind"])
    problems = []
    if not can_split(ranks):
        counts = ", ".join(f"{count} {name}" for name, count in heads.items())
        allowed = ", ".join(str(n) for n in range(1, heads["query heads"] + 1) if can_split(n))
        problems.append(
            f"tp_size={view.tp_size}: {model} has {counts} for {ranks} attention ranks; pass a"
            f" --tp-size that makes it one of {allowed}"
        )
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    if (experts + view.ep_num_redundant_experts) % view.ep_size:
        problems.append(
            f"ep_size={view.ep_size}: {model} has {experts} experts; pass an --ep-size that divides"
            " them"
        )
    return problems


def _lacks_triton() -> bool:
    from sglang.srt.platforms import current_platform

    return current_platform.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


def _has_other_windows(model_config: "ModelConfig") -> bool:
    """Whether SGLang's pool for windows holds other layers or heads than we take to have windows.
    SGLang's lists of layers may cover this pipeline stage only."""
    windows = set(window_layers(model_config.hf_text_config))
    in_windows = getattr(model_config, "swa_attention_layer_ids", None)
    whole = getattr(model_config, "full_attention_layer_ids", None)
    return (
        model_config.is_hybrid_swa_compress
        or not in_windows
        or not windows.issuperset(in_windows)
        or not windows.isdisjoint(whole or ())
    )


def device_problems(
    view: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> list[str]:
    """What the kernels and the dense side cannot compute, of resolved arguments."""
    problems = mode_of(view).model_problems(model_config)
    if view.device == "cuda":
        kernels = kernel_problems(view, model_config)
        return problems + kernels + dense_problems(view, model_config)
    fields = {DENSE_FIELD: getattr(view, DENSE_FIELD), "quantization": model_config.quantization}
    return problems + [
        f"{field}={value!r}: expected none on {view.device}: it requires a GPU"
        for field, value in fields.items()
        if value is not None
    ]


def runner_problems(runner: "ModelRunner") -> list[str]:
    """Properties that show only once the model is loaded and its KV pool allocated."""
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    problems = []
    pool = runner.token_to_kv_pool
    mixed = type(pool) in (SWAKVPool, HybridLinearKVPool)
    if mixed:
        pool = pool.full_kv_pool
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        problems.append(f"KV pool {type(pool).__name__}: {_OTHER_LAYOUT}")
    dtype = runner.kv_cache_dtype
    fp8 = dtype == torch.float8_e4m3fn
    if not fp8 and dtype not in (torch.bfloat16, torch.float16, torch.float32):
        problems.append(
            f"KV cache of dtype {dtype}: expected bfloat16, float16, float32 or float8_e4m3fn; pass"
            " --kv-cache-dtype bf16"
        )
    if fp8 and mixed:
        problems.append(
            "FP8 KV cache with linear attention or sliding windows in a pool of their own:"
            f" {_NOT_SHOWN}; pass --kv-cache-dtype bf16"
        )
    if fp8 and runner.device == "cuda":
        capability = torch.cuda.get_device_capability()
        problems += fp8_problems(capability, "FP8 KV cache", "--kv-cache-dtype bf16")
    return problems + layer_problems(runner)


def not_registered(error: Exception) -> RuntimeError:
    """The error of a selected backend whose plugin has failed with `error`."""
    return RuntimeError(
        f"sparrow-sglang could not be registered: {error!r}; install an SGLang that it runs with,"
        f" or choose another --attention-backend than {BACKEND}"
    )
