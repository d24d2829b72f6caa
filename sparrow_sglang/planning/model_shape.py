"""Shapes of a model that say what a decode step multiplies and reads, from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import (
    FULL,
    head_dim_of,
    layer_types_of,
    num_kv_heads_of,
    text_config,
)
from sparrow_sglang.json_values import quoted

_REFUSED = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


@dataclass(frozen=True)
class ModelShape:
    """Shapes of a gated transformer with grouped-query attention in all layers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the fields of a Hugging Face config.json. Raises `InputError` on a missing field,
        and on layers whose steps the terms do not describe: experts, latent attention, sliding
        windows, linear attention."""
        config = text_config(config)
        refused = list(_REFUSED)
        if set(layer_types_of(config)) - {FULL}:
            refused.append(
                "layer_types" if config.get("layer_types") else "full_attention_interval"
            )
        elif not layer_types_of(config) and config.get("use_sliding_window", True):
            refused.append("sliding_window")
        for key in refused:
            if config.get(key):
                raise InputError(
                    f"{key}={quoted(config[key])} cannot be predicted: expected dense layers with"
                    " full grouped-query attention"
                )
        return cls(
            hidden_size=_positive(config, "hidden_size"),
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_q_heads=_positive(config, "num_attention_heads"),
            num_kv_heads=num_kv_heads_of(config),
            head_dim=head_dim_of(config),
            vocab_size=_positive(config, "vocab_size"),
        )

    @property
    def weights(self) -> int:
        """Weights that every token is multiplied with. The input embedding is not among them, as
        a step looks up single rows."""
        attention = 2 * self.head_dim * (self.num_q_heads + self.num_kv_heads)
        layer = attention + 3 * self.intermediate_size
        return self.hidden_size * (self.num_layers * layer + self.vocab_size)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"{key}={value!r} in the model's config.json: expected a whole number of 1 or more"
        )
    return value
