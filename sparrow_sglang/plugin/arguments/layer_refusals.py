"""Properties of a loaded model's attention layers that sparse decode would compute wrongly."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparrow_sglang.hf_config import window_layers

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Attributes of SGLang's RadixAttention that sparse decode takes into account, or that do
# not affect the arithmetic: logit_capping_method says how a logit_cap is applied, which is refused;
# quant_method creates the scales, which are checked below.
LAYER_KNOWN = {
    *("tp_q_head_num", "tp_k_head_num", "head_dim", "scaling", "layer_id"),
    *("logit_capping_method", "quant_method"),
    # Concerns only CUDA graphs of a prefill (0.5.23).
    "use_prefill_attention_wrapper",
}
# Scales of an FP8 KV cache on a GPU: SGLang divides keys and values by the first when it writes
# them, and multiplies them by the second when it reads. Elsewhere both must be absent or 1.
LAYER_KV_SCALES = {"k_scale": "k_scale_float", "v_scale": "v_scale_float"}
# Scales that must be absent or 1: sparse decode supports no other quantisation in attention.
LAYER_SCALES = ("q_scale_float", "idx_q_scale_float", "idx_k_scale_float", "idx_v_scale_float")


def _plain_values(layer: Any, window: int | None) -> dict[str, Any]:
    """Attributes that affect the arithmetic, with the values that sparse decode computes by."""
    from sglang.srt.layers.radix_attention import AttentionType

    return {
        "attn_type": AttentionType.DECODER,
        "is_cross_attention": False,
        "logit_cap": 0.0,
        "pos_encoding_mode": "NONE",
        "qk_head_dim": layer.head_dim,
        "sliding_window_size": window,
        "tp_v_head_num": layer.tp_k_head_num,
        "use_irope": False,
        "v_head_dim": layer.head_dim,
        "xai_temperature_len": -1,
    }


def layer_problems(runner: "ModelRunner") -> list[str]:
    """Attributes of a loaded model's attention layers that would be computed wrongly."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    windows = window_layers(runner.model_config.hf_config)
    # Only in this case are keys and values multiplied by the layers' scales when they are read.
    scaled_kv = runner.kv_cache_dtype == torch.float8_e4m3fn and runner.device == "cuda"
    pairs = ((parent, child) for parent in runner.model.modules() for child in parent.children())
    layers = [pair for pair in pairs if isinstance(pair[1], RadixAttention)]
    if not layers:
        # SGLang's Transformers implementation keeps its layers outside the module tree; it drops
        # sinks, and windows in decode.
        name = type(runner.model).__name__
        return [f"{name}: its attention layers cannot be checked; pass --model-impl sglang"]
    problems = []
    for parent, layer in layers:
        # SGLang's own backend plans for one window size, that of the model.
        window = runner.sliding_window_size if layer.layer_id in windows else -1
        wrong = (*_odd_attributes(layer, window, scaled_kv), *_sinks(parent, layer))
        problems += [
            f"attention layer {layer.layer_id}: {name}={value!r} is not supported"
            for name, value in wrong
        ]
    return problems


def unknown_attributes() -> list[str]:
    """Attributes of this SGLang's attention layer that this module does not know, in one phrase."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(4, 16, 0.25, 2, layer_id=0)
    names = set(vars(layer)) - set(vars(torch.nn.Module()))
    scales = {*LAYER_SCALES, *LAYER_KV_SCALES, *LAYER_KV_SCALES.values()}
    known = {*LAYER_KNOWN, *_plain_values(layer, None), *scales}
    unknown = ", ".join(sorted(names - known))
    return [f"RadixAttention has {unknown}, which may ask for more"] if unknown else []


def _odd_attributes(layer: Any, window: int | None, scaled_kv: bool) -> Iterator[tuple[str, Any]]:
    for name, plain in _plain_values(layer, window).items():
        if (value := getattr(layer, name)) != plain:
            yield name, value
    kv_scales = [*LAYER_KV_SCALES, *LAYER_KV_SCALES.values()]
    for name in LAYER_SCALES if scaled_kv else (*kv_scales, *LAYER_SCALES):
        # `_scale` takes absent ones as 1: older versions lack some.
        if (value := _scale(layer, name)) != 1.0:
            yield name, value
    for divisor, factor in LAYER_KV_SCALES.items() if scaled_kv else ():
        # Not every loader of SGLang sets both.
        if not math.isclose(_scale(layer, divisor), _scale(layer, factor), rel_tol=1e-6):
            yield divisor, _scale(layer, divisor)


def _scale(layer: Any, name: str) -> float:
    value = getattr(layer, name, None)
    return 1.0 if value is None else float(value)


def _sinks(parent: "torch.nn.Module", layer: Any) -> Iterator[tuple[str, Any]]:
    """Shapes of learned sinks, which models hold beside the layer and pass with each call. Leaves
    out sinks like those of gpt-oss, one logit per query head, which the sparse step takes."""
    for name, value in (*parent.named_parameters(recurse=False), *vars(parent).items()):
        known = name == "sinks" and tuple(value.shape) == (layer.tp_q_head_num,)
        if "sink" in name and hasattr(value, "shape") and not known:
            yield name, tuple(value.shape)
