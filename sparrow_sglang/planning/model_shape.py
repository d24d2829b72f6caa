"""Shapes of a model that say what a decode step multiplies and reads, from its config.json.

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.errors import InputError

_REFUSED = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


@dataclass(frozen=True)
class ModelShape:
    """Shapes of a dense, gated transformer with grouped-query attention, values of 2 bytes."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the fields of a Hugging Face config.json.

        Raises `InputError` on a missing field and on mixture-of-experts, latent or
        sliding-window attention, whose weights and KV these formulas do not count.
        """
        windowed = ("sliding_window",) if config.get("use_sliding_window", True) else ()
        for key in (*_REFUSED, *windowed):
            if config.get(key):
                raise InputError(
                    f"{key}={config[key]}: the cost model covers dense models with full"
                    " grouped-query attention; mixture-of-experts, latent and sliding-window"
                    " attention are not counted"
                )
        names = {
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_q_heads": "num_attention_heads",
            "vocab_size": "vocab_size",
        }
        for key in names.values():
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise InputError(
                    f"{key}={config.get(key)!r} in the model's config.json: expected a whole number"
                    " of 1 or more; is this the config of a transformer decoder?"
                )
        heads = config["num_attention_heads"]
        return cls(
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            **{field: config[key] for field, key in names.items()},
        )

    @property
    def parameters(self) -> int:
        """P: weights that a token is multiplied with; a lookup in an input embedding is not."""
        heads = 2 * (self.num_q_heads + self.num_kv_heads)
        layer = self.hidden_size * (self.head_dim * heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def kv_width(self) -> int:
        """D: key and value values of one cached token over all layers."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_layers

    @property
    def gqa_ratio(self) -> float:
        """r: query heads per KV head."""
        return self.num_q_heads / self.num_kv_heads
