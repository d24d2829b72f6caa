"""How a sparse layer chooses its pages: the `selection` of a schedule.

`attention_backends.reference` defines what the fields mean, in torch. Imports neither torch nor
SGLang.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
    model_validator,
)

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import head_dim_of, num_kv_heads_of, num_layers_of
from sparrow_sglang.json_values import quoted
from sparrow_sglang.validation import first_problem

_MOST = 1024
_EXPECTED = {
    "landmark_tokens": "a whole number of tokens that divides page_size, or null for page_size",
    "landmark_bits": "16 or 4",
    "landmark_pairs": f"a whole number of rotary pairs, 1 to {_MOST}, null for all, or lists of"
    f" their indices, 0 to {_MOST - 1}: one list per layer and KV head",
    "group_score": "'mean_query' or 'best_head'",
    "layer_weights": "a list with one finite number, 0 or more, per layer of the model, or null",
}
_FORM = ("landmark_tokens", "landmark_bits", "landmark_pairs", "group_score")
_INT4_SCALE_BYTES = 2

PairLists = tuple[tuple[tuple[int, ...], ...], ...]
"""Indices of rotary pairs, by layer and KV head."""

_Weight = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
_Pair = Annotated[StrictInt, Field(ge=0, lt=_MOST)]
_OfHead = Annotated[tuple[_Pair, ...], Field(min_length=1)]
_OfLayer = Annotated[tuple[_OfHead, ...], Field(min_length=1)]
_PairLists = Annotated[tuple[_OfLayer, ...], Field(min_length=1)]
_PairCount = Annotated[StrictInt, Field(ge=1, le=_MOST)]
# The union is discriminated by kind, so that an error names the place within the lists.
_Pairs = Annotated[
    Annotated[_PairCount, Tag("count")] | Annotated[_PairLists, Tag("lists")],
    Discriminator(lambda given: "lists" if isinstance(given, list | tuple) else "count"),
]


class SelectionRule(BaseModel):
    """Which landmarks a page has, how they are scored, and how layers share the budget.

    The default is the published rule: one landmark per page, the mean of its keys in the dtype of
    the KV cache, scored by the mean query of a KV head's group, with the same budget in each layer.
    Raises `InputError` on construction, in one line that names the field.

    Attributes:
        landmark_tokens: tokens per landmark, a divisor of the page size; None for a whole page. A
            page scores as its best landmark does.
        landmark_bits: 16 for the dtype of the KV cache (bf16 with an FP8 cache); 4 for int4 codes
            with an fp16 scale per landmark.
        landmark_pairs: rotary pairs that a landmark keeps. A number keeps that many of the pairs
            that rotate slowest; lists hold ascending indices of pairs by layer of the model and KV
            head, equally many for each; None keeps all. Pair i of a head of D dimensions is
            (i, i + D/2), and a larger i rotates more slowly.
        group_score: "mean_query" scores by the mean of the query heads that share a KV head,
            "best_head" takes the largest score that any of them gives.
        layer_weights: one per layer of the model: layer l reads
            max(sink_pages + recent_pages, floor(w_l * budget_pages + 1/2)) pages. Those of dense
            layers are ignored; None for 1 in each layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    landmark_tokens: StrictInt | None = Field(default=None, ge=1, le=_MOST)
    landmark_bits: Literal[16, 4] = 16
    landmark_pairs: _Pairs | None = None
    group_score: Literal["mean_query", "best_head"] = "mean_query"
    layer_weights: tuple[_Weight, ...] | None = Field(default=None, min_length=1)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InputError(first_problem(error, type(self), _EXPECTED)) from None

    @model_validator(mode="after")
    def _check_pair_lists(self) -> "SelectionRule":
        if not isinstance(self.landmark_pairs, tuple):
            return self
        heads, count = len(self.landmark_pairs[0]), len(self.landmark_pairs[0][0])
        for layer, lists in enumerate(self.landmark_pairs):
            if len(lists) != heads:
                raise ValueError(
                    f"landmark_pairs[{layer}] has {len(lists)} lists: expected one for each KV"
                    f" head, {heads} as in landmark_pairs[0]"
                )
            for head, pairs in enumerate(lists):
                if len(pairs) != count or list(pairs) != sorted(set(pairs)):
                    raise ValueError(
                        f"landmark_pairs[{layer}][{head}]={quoted(list(pairs), 100)}: expected"
                        f" {count} distinct indices in ascending order, as many as in"
                        " landmark_pairs[0][0]"
                    )
        return self

    def sparse_weights(self, dense_layers: Sequence[int]) -> tuple[float, ...]:
        """Weights of the other layers; a single 1 stands for any number of them."""
        if self.layer_weights is None:
            return (1.0,)
        return tuple(w for layer, w in enumerate(self.layer_weights) if layer not in dense_layers)

    def __str__(self) -> str:
        """The rule in a few words, as for a log line."""
        if self == SelectionRule():
            return "published selection rule"
        tokens = "whole pages" if self.landmark_tokens is None else f"{self.landmark_tokens} tokens"
        kind = "int4 landmarks" if self.landmark_bits == 4 else "landmarks"
        pairs = ""
        if self.landmark_pairs is not None:
            chosen = " chosen" if isinstance(self.landmark_pairs, tuple) else ""
            pairs = f" in {self.pairs_kept(0)}{chosen} rotary pairs"
        weights = self.layer_weights
        spread = f", layer weights {min(weights):g} to {max(weights):g}" if weights else ""
        return f"{kind} of {tokens}{pairs}, {self.group_score.replace('_', ' ')}{spread}"

    @classmethod
    def read(cls, given: Any) -> "SelectionRule":
        """The rule in a schedule's `selection`. Raises `InputError` if it is not one."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise InputError(f"expected an object with any of {', '.join(cls.model_fields)}")
        return cls(**given)

    def landmarks_per_page(self, page_size: int) -> int:
        return page_size // (self.landmark_tokens or page_size)

    def int4_landmarks(self, page_size: int) -> int:
        """int4 landmarks of a page; 0 where landmarks have 16 bits."""
        return self.landmarks_per_page(page_size) if self.landmark_bits == 4 else 0

    def pairs_kept(self, head_dim: int) -> int:
        """Rotary pairs that a landmark holds, of the `head_dim` / 2 of a head."""
        if isinstance(self.landmark_pairs, tuple):
            return len(self.landmark_pairs[0][0])
        return self.landmark_pairs or head_dim // 2

    def pairs_of(self, layer: int | None, num_kv_heads: int, head_dim: int) -> NDArray[np.int64]:
        """Indices of the pairs that landmarks of a layer hold, ascending, [KV heads, pairs].

        `layer` may be None where `landmark_pairs` is no list.
        """
        if isinstance(self.landmark_pairs, tuple):
            assert layer is not None, "pairs were chosen by layer"
            return np.array(self.landmark_pairs[layer])
        slowest = np.arange(head_dim // 2)[-self.pairs_kept(head_dim) :]
        return np.tile(slowest, (num_kv_heads, 1))

    def require_model(self, hf_config: Any) -> None:
        """Raise `InputError` if the rule is for a model of another shape."""
        weights, pairs = self.layer_weights, self.landmark_pairs
        if weights is not None and len(weights) != (layers := num_layers_of(hf_config)):
            raise InputError(
                f"layer_weights has {len(weights)} numbers: expected one for each of the model's"
                f" {layers} layers"
            )
        if pairs is None:
            return
        head_dim = head_dim_of(hf_config)
        half, of_heads = head_dim // 2, f"as the model's heads have {head_dim} dimensions"
        if isinstance(pairs, int):
            if pairs > half:
                raise InputError(f"landmark_pairs={pairs}: expected at most {half}, {of_heads}")
            return
        shape = (num_layers_of(hf_config), num_kv_heads_of(hf_config))
        if (len(pairs), len(pairs[0])) != shape:
            raise InputError(
                f"landmark_pairs has lists for {len(pairs)} layers of {len(pairs[0])} KV heads:"
                f" expected {shape[0]} layers of {shape[1]}, as the model has"
            )
        if (largest := max(head[-1] for layer in pairs for head in layer)) >= half:
            raise InputError(
                f"landmark_pairs has the index {largest}: expected at most {half - 1}, {of_heads}"
            )

    def landmark_bytes(self, page_size: int, head_dim: int, mean_itemsize: int) -> int:
        """Bytes of the landmarks of one page and KV head; a number of a landmark that is not int4
        takes `mean_itemsize` bytes."""
        channels = 2 * self.pairs_kept(head_dim)
        per_landmark = channels * mean_itemsize
        if self.landmark_bits == 4:
            per_landmark = channels // 2 + _INT4_SCALE_BYTES
        return self.landmarks_per_page(page_size) * per_landmark

    def form(self, page_size: int) -> dict[str, Any]:
        """The fields that decide which landmarks exist and how they are read, None resolved."""
        fields = {name: getattr(self, name) for name in _FORM}
        return fields | {"landmark_tokens": self.landmark_tokens or page_size}

    def is_published_form(self, page_size: int) -> bool:
        """Whether landmarks and scores are those of the published rule."""
        return self.form(page_size) == SelectionRule().form(page_size)


def weighted_pages(budget_pages: NDArray[np.int64], weight: float, least: int) -> NDArray[np.int64]:
    """Pages that a layer of this weight may read where the schedule has `budget_pages`.

    The weight is rounded to fp32, as it is stored on the device; the product is exact.
    """
    share = np.floor(np.float64(np.float32(weight)) * budget_pages + 0.5)
    return np.maximum(share, least).astype(np.int64)
