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
        if not isinstance(config, Mapping):
            raise _wrong("text_config", config, "an object")
        num_layers, kinds = positive_field(config, "num_hidden_layers"), config.get("layer_types")
        if kinds is not None and not isinstance(kinds, list):
            raise _wrong("layer_types", kinds, "a list")
        if config.get(interval := "full_attention_interval") is not None:
            positive_field(config, interval)
        kinds = {kind if isinstance(kind, str) else "" for kind in layer_types_of(config)}
        refused = list(_REFUSED)
        if kinds - {FULL}:
            refused.append("layer_types" if config.get("layer_types") else interval)
        elif not kinds and config.get("use_sliding_window", True):
            refused.append("sliding_window")
        for key in refused:
            if config.get(key):
                raise InputError(
                    f"{key}={quoted(config[key])} cannot be predicted: expected dense layers with"
                    " full grouped-query attention"
                )
        return cls(
            hidden_size=positive_field(config, "hidden_size"),
            intermediate_size=positive_field(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=positive_field(config, "num_attention_heads"),
            num_kv_heads=_positive("num_key_value_heads", num_kv_heads_of(config)),
            head_dim=_positive("head_dim", head_dim_of(config)),
            vocab_size=positive_field(config, "vocab_size"),
        )

    @property
    def weights(self) -> int:
        """Weights that every token is multiplied with. The input embedding is not among them, as
        a step looks up single rows."""
        attention = 2 * self.head_dim * (self.num_q_heads + self.num_kv_heads)
        layer = attention + 3 * self.intermediate_size
        return self.hidden_size * (self.num_layers * layer + self.vocab_size)


def positive_field(config: Mapping[str, Any], key: str) -> int:
    """A size in a config; raises `InputError` on what is none."""
    return _positive(key, config.get(key))


def _positive(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(key, value, "a whole number of 1 or more")
    return value


def _wrong(key: str, value: Any, expected: str) -> InputError:
    return InputError(f"{key}={quoted(value)} in the model's config.json: expected {expected}")
