"""Shapes of a model that say what a decode step multiplies and reads, from its config.json.

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import (
    FULL,
    WINDOW,
    head_dim_of,
    layer_types_of,
    text_config,
    window_layers,
)
from sparrow_sglang.json_values import quoted
from sparrow_sglang.schedule import BudgetSchedule

_REFUSED = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
_KINDS = {FULL, WINDOW}


@dataclass(frozen=True)
class ModelShape:
    """Shapes of a dense, gated transformer with grouped-query attention, values of 2 bytes.

    Attributes:
        window_layers: layers that attend to the latest `window_tokens` tokens only.
        window_tokens: 0 where there are none.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    window_layers: tuple[int, ...] = ()
    window_tokens: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the fields of a Hugging Face config.json.

        Raises `InputError` on a missing field and on mixture-of-experts, latent or linear
        attention, whose weights and KV these formulas do not count, and on a sliding window
        without `layer_types` that say which layers have it.
        """
        config = text_config(config)
        windows = window_layers(config)
        refused = list(_REFUSED)
        if not layer_types_of(config) and config.get("use_sliding_window", True):
            refused.append("sliding_window")
        if set(layer_types_of(config)) - _KINDS:
            refused.append("layer_types")
        for key in refused:
            if config.get(key):
                raise InputError(
                    f"{key}={quoted(config[key])}: the cost model covers dense models with"
                    " grouped-query attention, full or with a sliding window in the layers that"
                    " layer_types names; mixture-of-experts, latent and linear attention are not"
                    " counted"
                )
        names = {
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_q_heads": "num_attention_heads",
            "vocab_size": "vocab_size",
        }
        if windows:
            names["window_tokens"] = "sliding_window"
        for key in names.values():
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise InputError(
                    f"{key}={config.get(key)!r} in the model's config.json: expected a whole number"
                    " of 1 or more; is this the config of a transformer decoder?"
                )
        heads = config["num_attention_heads"]
        return cls(
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim_of(config),
            window_layers=windows,
            **{field: config[key] for field, key in names.items()},
        )

    @property
    def parameters(self) -> int:
        """P: weights that a token is multiplied with; a lookup in an input embedding is not."""
        heads = 2 * (self.num_q_heads + self.num_kv_heads)
        layer = self.hidden_size * (self.head_dim * heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def layer_kv_width(self) -> int:
        """Key and value values of one cached token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """D: key and value values of one cached token over the layers that keep the whole KV."""
        return self.layer_kv_width * (self.num_layers - len(self.window_layers))

    def dense_layers(self, schedule: BudgetSchedule) -> int:
        """How many of the layers that keep the whole KV are dense under `schedule`."""
        dense = set(schedule.dense_layers) - set(self.window_layers)
        return sum(layer < self.num_layers for layer in dense)

    @property
    def gqa_ratio(self) -> float:
        """r: query heads per KV head."""
        return self.num_q_heads / self.num_kv_heads
