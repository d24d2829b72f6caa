"""Shapes of a model that say what a decode step multiplies and reads, from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import (
    FULL,
    LINEAR,
    WINDOW,
    head_dim_of,
    layer_types_of,
    linear_layers,
    num_kv_heads_of,
    text_config,
    window_layers,
)
from sparrow_sglang.json_values import quoted
from sparrow_sglang.schedules.schedule import BudgetSchedule

_REFUSED = ("n_routed_experts", "n_shared_experts", "kv_lora_rank")
_KINDS = {FULL, WINDOW, LINEAR}
_STATE_ITEMSIZE, _CONVOLUTION_ITEMSIZE = 4, 2

KV_ITEMSIZES = {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1}
"""Bytes of a cached number by the --kv-cache-dtype that sparse decode can run with."""


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts blocks in place of dense ones, in `layers` of a model's layers. A router
    sends each token to `per_token` of `number` gated experts of width `size`, and all tokens go to
    one more of width `shared_size`, behind a gate of its own; 0 where there is none."""

    number: int
    per_token: int
    size: int
    layers: int
    shared_size: int = 0

    def expected(self, batch: int) -> float:
        """Experts of a layer that a step of `batch` tokens reads, if all are equally likely. One
        token leaves an expert out with probability 1 - k / E, so E (1 - (1 - k / E)^batch) of E are
        read. Real routers are less even and read fewer."""
        return float(self.number * (1 - (1 - self.per_token / self.number) ** batch))


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta rule in place of attention over KV, as in Qwen3-Next and Qwen3.5. Each of
    `value_heads` keeps a state of key_dim x value_dim numbers in fp32, and a convolution keeps the
    latest `conv_tokens` - 1 of its inputs in 16 bits, as SGLang does by default."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LinearAttention | None":
        """None without such layers. Raises `InputError` if a field of it is missing."""
        if not (layers := linear_layers(config)):
            return None
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        widths = [_positive(config, f"linear_{name}") for name in (*names, "conv_kernel_dim")]
        return cls(layers, *widths)

    @property
    def _convolved(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def weights(self, hidden_size: int) -> int:
        """Weights of a layer: projections of queries, keys, values, gates, outputs; convolution."""
        values = self.value_heads * self.value_dim
        inputs = self._convolved + values + 2 * self.value_heads
        return hidden_size * (inputs + values) + self._convolved * self.conv_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes that one sequence keeps in one layer, whatever its length."""
        state = self.value_heads * self.key_dim * self.value_dim
        inputs = self._convolved * (self.conv_tokens - 1)
        return _STATE_ITEMSIZE * state + _CONVOLUTION_ITEMSIZE * inputs

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step reads and writes of one sequence's states, in all layers."""
        return 2 * len(self.layers) * self.state_bytes


@dataclass(frozen=True)
class ModelShape:
    """Shapes of a gated transformer with grouped-query attention, weights of 2 bytes.

    Attributes:
        intermediate_size: width of the MLP in layers without experts; 0 if all have experts.
        window_layers: layers that attend to the latest `window_tokens` tokens only.
        linear: with it, the other layers' attention has a gate as wide as its queries.
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
    linear: LinearAttention | None = None
    experts: Experts | None = None
    kv_itemsize: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the fields of a Hugging Face config.json. Raises `InputError` on a missing field, on
        DeepSeek's experts and latent attention, and on a sliding window without `layer_types`."""
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
                    f"{key}={quoted(config[key])} cannot be predicted: expected grouped-query"
                    " attention, windows and gated delta rules named in layer_types, routed experts"
                )
        num_layers = _positive(config, "num_hidden_layers")
        experts = _experts(config, num_layers)
        all_experts = experts is not None and experts.layers == num_layers
        return cls(
            hidden_size=_positive(config, "hidden_size"),
            intermediate_size=0 if all_experts else _positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=_positive(config, "num_attention_heads"),
            num_kv_heads=num_kv_heads_of(config),
            head_dim=head_dim_of(config),
            vocab_size=_positive(config, "vocab_size"),
            window_layers=windows,
            window_tokens=_positive(config, "sliding_window") if windows else 0,
            linear=LinearAttention.from_config(config),
            experts=experts,
        )

    def on_rank(self, ranks: int) -> "ModelShape":
        """The part of each layer that one of `ranks` tensor-parallel ranks holds. Distributing
        whole experts over expert-parallel ranks gives the same number of weights. KV heads are
        repeated where there are more ranks than heads, as SGLang does."""
        experts, linear = self.experts, self.linear
        if experts:
            shared = experts.shared_size // ranks
            experts = replace(experts, size=experts.size // ranks, shared_size=shared)
        if linear:
            keys, values = linear.key_heads // ranks, linear.value_heads // ranks
            linear = replace(linear, key_heads=keys, value_heads=values)
        return replace(
            self,
            intermediate_size=self.intermediate_size // ranks,
            num_q_heads=self.num_q_heads // ranks,
            num_kv_heads=max(1, self.num_kv_heads // ranks),
            vocab_size=-(-self.vocab_size // ranks),
            linear=linear,
            experts=experts,
        )

    def weights_read(self, batch: int) -> float:
        """Weights that a step of `batch` tokens reads: of experts those expected to be chosen, of
        the input embedding nothing, as a step looks up single rows."""
        if self.experts is None:
            return self._shared
        chosen = self.experts.layers * self.experts.expected(batch)
        return self._shared + chosen * 3 * self.hidden_size * self.experts.size

    @property
    def _shared(self) -> int:
        """Weights that every token is multiplied with, routers among them."""
        heads = 2 * (self.num_q_heads + self.num_kv_heads)
        if self.linear:
            heads += self.num_q_heads
        attention = self.kv_layers * self.hidden_size * self.head_dim * heads
        if self.linear:
            attention += len(self.linear.layers) * self.linear.weights(self.hidden_size)
        dense_layers, outputs = self.num_layers, self.vocab_size
        if self.experts:
            dense_layers -= self.experts.layers
            shared = self.experts.shared_size
            gated = 3 * shared + 1 if shared else 0
            outputs += self.experts.layers * (self.experts.number + gated)
        outputs += 3 * self.intermediate_size * dense_layers
        return attention + self.hidden_size * outputs

    @property
    def kv_layers(self) -> int:
        """Layers that keep KV, those with a sliding window among them."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def whole_layers(self) -> int:
        """Layers that keep the whole KV and read it where they are dense."""
        return self.kv_layers - len(self.window_layers)

    @property
    def layer_kv_width(self) -> int:
        """Key and value values of one cached token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    def dense_layers(self, schedule: BudgetSchedule) -> int:
        dense = set(schedule.dense_layers) - set(self.partial_layers)
        return sum(layer < self.num_layers for layer in dense)

    @property
    def partial_layers(self) -> tuple[int, ...]:
        return self.window_layers + (self.linear.layers if self.linear else ())


def _experts(config: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Routed experts, in all layers or every n-th, as Qwen3-MoE and Mixtral have them; with a
    shared one as in Qwen2-MoE, Qwen3-Next and Qwen3.5."""
    key = "num_experts" if config.get("num_experts") else "num_local_experts"
    if not config.get(key):
        return None
    size = "moe_intermediate_size"
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = [layer for layer in range(num_layers) if (layer + 1) % every == 0]
    return Experts(
        number=_positive(config, key),
        per_token=_positive(config, "num_experts_per_tok"),
        size=_positive(config, size if config.get(size) else "intermediate_size"),
        layers=len([layer for layer in layers if layer not in dense]),
        shared_size=config.get("shared_expert_intermediate_size") or 0,
    )


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"{key}={value!r} in the model's config.json: expected a whole number of 1 or more"
        )
    return value
