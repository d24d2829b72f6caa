"""What a model's attention layers ask for that sparse decode would not do.

In: the loaded model. Out: one sentence per problem, naming the layer, its attribute and the value.
SGLang's backends ignore attributes that they do not know, so somebody has to look at all of them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Attributes of SGLang's RadixAttention (0.5.17) that sparse decode goes by, or that say nothing of
# the arithmetic: logit_capping_method is how a logit_cap is applied, which is refused; quant_method
# creates the scales, which are looked at.
KNOWN = frozenset(
    {
        "tp_q_head_num",
        "tp_k_head_num",
        "head_dim",
        "scaling",
        "layer_id",
        "logit_capping_method",
        "quant_method",
    }
)
# Those that must have the value of plain attention.
PLAIN = {
    "logit_cap": 0.0,
    "sliding_window_size": -1,
    "is_cross_attention": False,
    "use_irope": False,
    "pos_encoding_mode": "NONE",
    "xai_temperature_len": -1,
}
# Those that must be absent or 1: the KV cache is not quantised.
SCALES = (
    "k_scale",
    "v_scale",
    "k_scale_float",
    "v_scale_float",
    "q_scale_float",
    "idx_q_scale_float",
    "idx_k_scale_float",
    "idx_v_scale_float",
)
# Those that must equal another attribute of the layer.
EQUAL = {
    "qk_head_dim": "head_dim",
    "v_head_dim": "head_dim",
    "tp_v_head_num": "tp_k_head_num",
}


def layer_problems(model: "torch.nn.Module") -> list[str]:
    """Attention layers of a loaded model that sparse decode would compute wrongly."""
    from sglang.srt.layers.radix_attention import RadixAttention

    problems = []
    for parent in model.modules():
        for layer in parent.children():
            if isinstance(layer, RadixAttention):
                problems += [
                    f"attention layer {layer.layer_id}: {name}={value!r} is not supported"
                    for name, value in (*_odd_attributes(layer), *_sinks(parent))
                ]
    return problems


def _odd_attributes(layer: Any) -> Iterator[tuple[str, Any]]:
    from sglang.srt.layers.radix_attention import AttentionType

    for name, plain in PLAIN.items():
        if (value := getattr(layer, name)) != plain:
            yield name, value
    for name in SCALES:
        value = getattr(layer, name)
        if value is not None and float(value) != 1.0:
            yield name, float(value)
    for name, other in EQUAL.items():
        if (value := getattr(layer, name)) != getattr(layer, other):
            yield name, value
    if layer.attn_type != AttentionType.DECODER:
        yield "attn_type", layer.attn_type


def _sinks(parent: "torch.nn.Module") -> Iterator[tuple[str, Any]]:
    """Shapes of learned sinks, which models hold beside the layer and pass with each call."""
    for name, value in (*parent.named_parameters(recurse=False), *vars(parent).items()):
        if "sink" in name and hasattr(value, "shape"):
            yield name, tuple(value.shape)
