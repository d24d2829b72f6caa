"""Fields of a model's Hugging Face config, which is an object or a mapping.

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from typing import Any

FULL, WINDOW = "full_attention", "sliding_attention"


def config_value(hf_config: Any, key: str) -> Any:
    """The field `key`, None where the config has none."""
    if isinstance(hf_config, Mapping):
        return hf_config.get(key)
    return getattr(hf_config, key, None)


def text_config(hf_config: Any) -> Any:
    """The config of the language model, which models of several modalities keep in a field."""
    return config_value(hf_config, "text_config") or hf_config


def num_layers_of(hf_config: Any) -> int:
    """Layers of the language model."""
    layers: int = config_value(text_config(hf_config), "num_hidden_layers")
    return layers


def head_dim_of(hf_config: Any) -> int:
    """Dimensions of an attention head."""
    text = text_config(hf_config)
    head_dim: int = config_value(text, "head_dim") or (
        config_value(text, "hidden_size") // config_value(text, "num_attention_heads")
    )
    return head_dim


def num_kv_heads_of(hf_config: Any) -> int:
    """KV heads of a layer; as many as query heads where the config names none."""
    text = text_config(hf_config)
    heads: int = config_value(text, "num_key_value_heads") or (
        config_value(text, "num_attention_heads")
    )
    return heads


def layer_types_of(hf_config: Any) -> tuple[str, ...]:
    """The kind of each layer's attention, such as "full_attention"; empty if the config names none.

    transformers names one for each layer, so a model whose layers all keep the whole KV may have
    either.
    """
    return tuple(config_value(text_config(hf_config), "layer_types") or ())


def window_layers(hf_config: Any) -> tuple[int, ...]:
    """Layers that attend to a sliding window of the latest tokens only, ascending."""
    kinds = layer_types_of(hf_config)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOW)
