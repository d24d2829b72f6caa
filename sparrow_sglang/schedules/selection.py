"""How a sparse layer chooses its pages: the `selection` of a schedule.
`attention_backends.reference` defines what the fields mean, in torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import head_dim_of, num_kv_heads_of, num_layers_of
from sparrow_sglang.json_values import quoted
from sparrow_sglang.validation import first_problem

_MOST_PAIRS = 1024
_MOST_LANDMARKS = 8
_INT4_SCALE_BYTES = 2

PairLists = tuple[tuple[tuple[int, ...], ...], ...]
"""Indices of rotary pairs, by layer and KV head."""

_Weight = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
_Pair = Annotated[StrictInt, Field(ge=0, lt=_MOST_PAIRS)]
_OfHead = Annotated[tuple[_Pair, ...], Field(min_length=1)]
_OfLayer = Annotated[tuple[_OfHead, ...], Field(min_length=1)]
_PairLists = Annotated[tuple[_OfLayer, ...], Field(min_length=1)]


def int4_landmark_tokens(page_size: int) -> int:
    """Tokens of an int4 landmark: four, or more where a page would have more than eight."""
    # Landmarks of two tokens rank pages better, but a step reads twice as many.
    return max(4, page_size // _MOST_LANDMARKS)


class SelectionRule(BaseModel):
    """Which landmarks a page has, how they are scored, and how layers share the budget.

    There are two rules. The default is the published one: one landmark per page, the mean of its
    keys in the dtype of the KV cache, scored by the mean query of a KV head's group, with the same
    budget in each layer. With `landmark_bits` 4, a landmark is the mean of `int4_landmark_tokens`,
    stored as int4 codes with an fp16 scale; a page scores as its best landmark does with any query
    of the group. Raises `InputError` on construction, in one line that names the field.

    Attributes:
        landmark_bits: 16 for the published rule, 4 for the other, which alone has the following.
        landmark_pairs: rotary pairs that a landmark keeps: ascending indices by layer of the model
            and KV head, equally many for each; None for all. Pair i of a head of D dimensions is
            (i, i + D/2).
        layer_weights: one per layer of the model: layer l reads
            max(sink_pages + recent_pages, floor(w_l * budget_pages + 1/2)) pages. Those of dense
            layers are ignored; None for 1 in each layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    landmark_bits: Literal[16, 4] = 16
    landmark_pairs: _PairLists | None = None
    layer_weights: tuple[_Weight, ...] | None = Field(default=None, min_length=1)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InputError(first_problem(error, type(self))) from None

    @model_validator(mode="after")
    def _check(self) -> "SelectionRule":
        for field in () if self.int4 else ("landmark_pairs", "layer_weights"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field} with landmark_bits=16: expected null")
        if self.landmark_pairs is None:
            return self
        lists = [head for layer in self.landmark_pairs for head in layer]
        if len(set(map(len, self.landmark_pairs))) > 1 or len(set(map(len, lists))) > 1:
            raise ValueError("landmark_pairs: expected equally many lists and indices everywhere")
        for pairs in lists:
            if list(pairs) != sorted(set(pairs)):
                raise ValueError(f"landmark_pairs: {quoted(pairs, 60)}: expected to ascend")
        return self

    @property
    def int4(self) -> bool:
        return self.landmark_bits == 4

    def sparse_weights(self, dense_layers: Sequence[int]) -> tuple[float, ...]:
        """Weights of the other layers; a single 1 for any number of equal ones."""
        if self.layer_weights is None:
            return (1.0,)
        return tuple(w for layer, w in enumerate(self.layer_weights) if layer not in dense_layers)

    def __str__(self) -> str:
        if not self.int4:
            return "published selection rule"
        chosen, weights = self.landmark_pairs, self.layer_weights
        pairs = f" in {len(chosen[0][0])} rotary pairs" if chosen else ""
        spread = f", layer weights {min(weights):g} to {max(weights):g}" if weights else ""
        return f"int4 landmarks{pairs}{spread}"

    def pairs_kept(self, head_dim: int) -> int:
        """Rotary pairs that a landmark holds, of the `head_dim` / 2 of a head."""
        return head_dim // 2 if self.landmark_pairs is None else len(self.landmark_pairs[0][0])

    def require_model(self, hf_config: Any) -> None:
        """Raise `InputError` if the rule is for a model of another shape."""
        weights, pairs = self.layer_weights, self.landmark_pairs
        if weights is not None and len(weights) != (layers := num_layers_of(hf_config)):
            raise InputError(f"layer_weights has {len(weights)} numbers: expected {layers}")
        if pairs is None:
            return
        layers, heads = num_layers_of(hf_config), num_kv_heads_of(hf_config)
        if (len(pairs), len(pairs[0])) != (layers, heads):
            raise InputError(
                f"landmark_pairs has lists for {len(pairs)} layers of {len(pairs[0])} KV heads:"
                f" expected {layers} layers of {heads}, as the model has"
            )
        most = head_dim_of(hf_config) // 2 - 1
        if (largest := max(head[-1] for layer in pairs for head in layer)) > most:
            raise InputError(f"landmark_pairs has the index {largest}: expected at most {most}")

    def landmark_bytes(self, page_size: int, head_dim: int, mean_itemsize: int) -> int:
        """Bytes of the landmarks of one page and KV head; a number of a landmark that is not int4
        takes `mean_itemsize` bytes."""
        pairs = self.pairs_kept(head_dim)
        if self.int4:
            return page_size // int4_landmark_tokens(page_size) * (pairs + _INT4_SCALE_BYTES)
        return 2 * pairs * mean_itemsize


def weighted_pages(budget_pages: NDArray[np.int64], weight: float, least: int) -> NDArray[np.int64]:
    """Pages that a layer of this weight may read where the schedule has `budget_pages`. The weight
    is rounded to fp32, as it is stored on the device; the product is exact."""
    share = np.floor(np.float64(np.float32(weight)) * budget_pages + 0.5)
    return np.maximum(share, least).astype(np.int64)
