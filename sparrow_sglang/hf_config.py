"""Fields of a model's Hugging Face config, which is an object or a mapping.

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from typing import Any


def config_value(hf_config: Any, key: str) -> Any:
    """The field `key`, None where the config has none."""
    if isinstance(hf_config, Mapping):
        return hf_config.get(key)
    return getattr(hf_config, key, None)


def text_config(hf_config: Any) -> Any:
    """The config of the language model, which models of several modalities keep in a field."""
    return config_value(hf_config, "text_config") or hf_config


def head_dim_of(hf_config: Any) -> int:
    """Dimensions of an attention head."""
    text = text_config(hf_config)
    head_dim: int = config_value(text, "head_dim") or (
        config_value(text, "hidden_size") // config_value(text, "num_attention_heads")
    )
    return head_dim
