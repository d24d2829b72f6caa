"""Fields of a model's Hugging Face config, which is an object or a mapping."""

from collections.abc import Mapping
from typing import Any

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def config_value(hf_config: Any, key: str) -> Any:
    if isinstance(hf_config, Mapping):
        return hf_config.get(key)
    return getattr(hf_config, key, None)


def text_config(hf_config: Any) -> Any:
    """The language model's config, which models of several modalities keep in a field."""
    return config_value(hf_config, "text_config") or hf_config


def model_value(hf_config: Any, key: str) -> Any:
    """The field `key` of a config, or else of its language model's; None where neither has one."""
    value = config_value(hf_config, key)
    return config_value(text_config(hf_config), key) if value is None else value


def num_layers_of(hf_config: Any) -> int:
    return config_value(text_config(hf_config), "num_hidden_layers")


def head_dim_of(hf_config: Any) -> int:
    text = text_config(hf_config)
    return config_value(text, "head_dim") or (
        config_value(text, "hidden_size") // config_value(text, "num_attention_heads")
    )


def num_kv_heads_of(hf_config: Any) -> int:
    text = text_config(hf_config)
    return config_value(text, "num_key_value_heads") or config_value(text, "num_attention_heads")


def layer_types_of(hf_config: Any) -> tuple[str, ...]:
    """The kind of each layer's attention, such as "full_attention"; empty if the config names none.
    With linear attention, SGLang's own configs say only that each n-th layer has full attention."""
    text = text_config(hf_config)
    interval = config_value(text, "full_attention_interval")
    if named := config_value(text, "layer_types"):
        return tuple(named)
    layers = range(1, num_layers_of(hf_config) + 1) if interval else ()
    return tuple(LINEAR if layer % interval else FULL for layer in layers)


def window_layers(hf_config: Any) -> tuple[int, ...]:
    """Layers that attend to a sliding window of the latest tokens only, ascending."""
    return _layers(hf_config, WINDOW)


def linear_layers(hf_config: Any) -> tuple[int, ...]:
    """Layers with linear attention, which keep a state of fixed size and no KV, ascending."""
    return _layers(hf_config, LINEAR)


def partial_layers(hf_config: Any) -> tuple[int, ...]:
    return tuple(sorted(window_layers(hf_config) + linear_layers(hf_config)))


def _layers(hf_config: Any, kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, name in enumerate(layer_types_of(hf_config)) if name == kind)
