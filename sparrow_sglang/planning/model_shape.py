"""Shapes of a model that say what a decode step multiplies and reads, from its config.json.

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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

_REFUSED = (
    "n_routed_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "full_attention_interval",
)
_KINDS = {FULL, WINDOW}


KV_ITEMSIZES = {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1}
"""Bytes of a cached number by the --kv-cache-dtype that sparse decode can run with."""


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts blocks in place of dense ones, in `layers` of a model's layers.

    A router sends each token to `per_token` of `number` gated experts of width `size`.
    """

    number: int
    per_token: int
    size: int
    layers: int

    def expected(self, batch: float) -> float:
        """Experts of a layer that a step of `batch` tokens reads, if each choice is as likely.

        One token leaves an expert out with probability 1 - k / E, so E (1 - (1 - k / E)^batch) of
        E are read. Real routers are less even and read fewer.
        """
        return float(self.number * (1 - (1 - self.per_token / self.number) ** batch))


@dataclass(frozen=True)
class ModelShape:
    """Shapes of a gated transformer with grouped-query attention, weights of 2 bytes.

    Attributes:
        intermediate_size: width of the MLP in layers without experts.
        window_layers: layers that attend to the latest `window_tokens` tokens only.
        window_tokens: 0 where there are none.
        experts: None for a dense model.
        kv_itemsize: bytes of a number in the KV cache, 2 or 1.
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
    experts: Experts | None = None
    kv_itemsize: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the fields of a Hugging Face config.json.

        Raises `InputError` on a missing field and on shared experts, latent or linear attention,
        whose weights and KV these formulas do not count, and on a sliding window without
        `layer_types` that say which layers have it.
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
                    f"{key}={quoted(config[key])}: the cost model covers models with grouped-query"
                    " attention, full or with a sliding window in the layers that layer_types"
                    " names, and dense or with routed experts; shared experts, latent and linear"
                    " attention are not counted"
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
        fields = {field: _positive(config, key) for field, key in names.items()}
        return cls(
            num_kv_heads=config.get("num_key_value_heads") or fields["num_q_heads"],
            head_dim=head_dim_of(config),
            window_layers=windows,
            experts=_experts(config, fields["num_layers"]),
            **fields,
        )

    def on_rank(self, ranks: int) -> "ModelShape":
        """The part of each layer that one of `ranks` tensor-parallel ranks holds.

        Whole experts shared out among expert-parallel ranks are as many weights. KV heads are
        repeated where there are more ranks than heads, as SGLang does. Raises `InputError` unless
        heads and widths can be split.
        """
        kv_heads, ragged = divmod(self.num_kv_heads, ranks)
        if ragged and ranks % self.num_kv_heads:
            raise InputError(
                f"{ranks} tensor-parallel ranks: {self.num_kv_heads} KV heads cannot be shared"
                " among them; expected a divisor or a multiple of the heads"
            )

        def part(width: int, what: str) -> int:
            if width % ranks:
                raise InputError(
                    f"{ranks} tensor-parallel ranks: {what} of {width} cannot be shared among"
                    " them; expected a divisor"
                )
            return width // ranks

        experts = self.experts
        return replace(
            self,
            intermediate_size=part(self.intermediate_size, "an MLP"),
            num_q_heads=part(self.num_q_heads, "a number of query heads"),
            num_kv_heads=max(1, kv_heads),
            vocab_size=-(-self.vocab_size // ranks),
            experts=experts and replace(experts, size=part(experts.size, "an expert")),
        )

    @property
    def parameters(self) -> int:
        """P: weights that a token is multiplied with; a lookup in an input embedding is not."""
        experts = self.experts
        return self._shared + (experts.layers * experts.per_token * self._expert if experts else 0)

    def weights_read(self, batch: float) -> float:
        """Weights that a step of `batch` tokens reads, of experts those expected to be chosen.

        All that are multiplied with any token for `batch=math.inf`.
        """
        if self.experts is None:
            return self._shared
        return self._shared + self.experts.layers * self.experts.expected(batch) * self._expert

    @property
    def _shared(self) -> int:
        """Weights that every token is multiplied with, routers among them."""
        heads = 2 * (self.num_q_heads + self.num_kv_heads)
        attention = self.num_layers * self.hidden_size * self.head_dim * heads
        dense_layers = self.num_layers - (self.experts.layers if self.experts else 0)
        routers = self.experts.layers * self.experts.number if self.experts else 0
        outputs = 3 * self.intermediate_size * dense_layers + routers + self.vocab_size
        return attention + self.hidden_size * outputs

    @property
    def _expert(self) -> int:
        return 3 * self.hidden_size * self.experts.size if self.experts else 0

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


def _experts(config: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Routed experts; as Qwen3-MoE and Mixtral have them, in all layers or every n-th."""
    key = "num_experts" if config.get("num_experts") else "num_local_experts"
    if not config.get(key):
        return None
    size = "moe_intermediate_size"
    number, per_token = _positive(config, key), _positive(config, "num_experts_per_tok")
    if per_token > number:
        raise InputError(f"num_experts_per_tok={per_token}: expected at most {key}={number}")
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = [layer for layer in range(num_layers) if (layer + 1) % every == 0]
    return Experts(
        number=number,
        per_token=per_token,
        size=_positive(config, size if config.get(size) else "intermediate_size"),
        layers=len([layer for layer in layers if layer not in dense]),
    )


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"{key}={value!r} in the model's config.json: expected a whole number of 1 or more; is"
            " this the config of a transformer decoder?"
        )
    return value
