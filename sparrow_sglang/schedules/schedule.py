"""The KV budget of sparse decode as a function of sequence length, and the rules by which a sparse
layer chooses its pages. `attention_backends.reference` defines these in torch."""

import json
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import linear_layers, model_value, num_layers_of, partial_layers
from sparrow_sglang.json_values import cut, quoted, read_object
from sparrow_sglang.validation import first_problem

PAGE_SIZES = (16, 32, 64)
PAGE_SIZE = 16
"""Tokens per page where nothing else is chosen."""
ENOUGH_TOKENS = 1000
"""Tokens of a bin from which on its tail counts as measured."""
# Tables on the device hold whole numbers of 32 bits.
MAX_TOKENS = 2**30
MAX_BINS = 1024
DENSE = "dense"
"""Name of the schedule under which every step reads everything."""
DRAFTS = "drafts"
"""Name of `BudgetSchedule.drafts`."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

SelectionRule = Literal["published", "int4"]
"""`PUBLISHED`: a page has one landmark, the mean of its keys in the dtype of the KV cache, scored
by the mean query of a KV head's group. `INT4`: a landmark is the mean of `int4_landmark_tokens`,
stored as int4 codes with an fp16 scale; a page scores as its best landmark does with any query of
the group."""

PUBLISHED: Final = "published"
INT4: Final = "int4"
RULES: tuple[SelectionRule, ...] = get_args(SelectionRule)

# What a switch on a running server cannot change.
_FIXED = ("page_size", "sink_pages", "recent_pages", "dense_layers", "selection")

_MOST_LANDMARKS = 8
_SCALE_BYTES = 2

_Count = Annotated[StrictInt, Field(le=MAX_TOKENS)]


class ScheduleError(InputError):
    """A schedule cannot be used; the message names file, field, value and what is allowed."""


class BudgetSchedule(BaseModel):
    """Sequence length -> total KV budget, sinks and recent pages included.

    A sequence of L cached tokens (the current one included) fills n = ceil(L / page_size) pages and
    falls into bin min(n // bin_pages, last bin). Sequences of up to dense_tokens are read whole, by
    requests without a budget of their own. Raises `ScheduleError` on construction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: StrictStr = Field(pattern=rf"^{NAME.pattern}\z")
    page_size: Literal[16, 32, 64]
    bin_tokens: _Count = Field(gt=0)
    budget_tokens: tuple[_Count, ...] = Field(min_length=1, max_length=MAX_BINS)
    sink_pages: _Count = Field(default=1, ge=0)
    recent_pages: _Count = Field(default=2, ge=1)
    dense_tokens: _Count = Field(default=0, ge=0)
    dense_layers: tuple[_Count, ...] = (0, 1)
    selection: SelectionRule = PUBLISHED
    calibrated: StrictBool = False
    model: StrictStr | None = None
    tail_target: float | None = Field(default=None, gt=0, le=1, strict=True)
    model_match: dict[str, StrictInt | StrictStr | list[StrictStr]] | None = None
    provenance: dict[str, JsonValue] = Field(default_factory=dict)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ScheduleError(first_problem(error, type(self))) from None

    @model_validator(mode="after")
    def _check(self) -> "BudgetSchedule":
        page = self.page_size
        whole = {"bin_tokens": self.bin_tokens, "dense_tokens": self.dense_tokens}
        whole |= {f"budget_tokens[{i}]": tokens for i, tokens in enumerate(self.budget_tokens)}
        for field, tokens in whole.items():
            if tokens % page:
                raise ValueError(f"{field}={tokens}: expected a multiple of page_size={page}")
        floor = self.least_pages * page
        for i, tokens in enumerate(self.budget_tokens):
            if tokens < floor:
                raise ValueError(
                    f"budget_tokens[{i}]={tokens}: expected sinks and recent pages or more, {floor}"
                )
            if i and tokens < (before := self.budget_tokens[i - 1]):
                raise ValueError(f"budget_tokens[{i}]={tokens}: expected not to fall from {before}")
        if self.name == DENSE and not self.is_dense:
            raise ValueError(f"name={DENSE!r}: expected another name, as it reads less")
        layers = self.dense_layers
        if any(layer < 0 for layer in layers) or len(set(layers)) != len(layers):
            raise ValueError(f"dense_layers={quoted(list(layers))}: expected distinct indices")
        try:
            # Ranks compare schedules, and answers over HTTP carry them.
            evidence = [self.model, self.model_match, self.provenance]
            json.dumps(evidence, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"model, model_match, provenance: not JSON ({error})") from None
        return self

    @cached_property
    def bin_pages(self) -> int:
        return self.bin_tokens // self.page_size

    @cached_property
    def budget_pages(self) -> tuple[int, ...]:
        return tuple(tokens // self.page_size for tokens in self.budget_tokens)

    def num_pages(self, seq_len: int) -> int:
        return -(-seq_len // self.page_size)

    def budget_at(self, seq_len: int) -> int:
        """Total budget in tokens at `seq_len` cached tokens; may exceed `seq_len`."""
        index = self.num_pages(seq_len) // self.bin_pages
        return self.budget_tokens[min(index, len(self.budget_tokens) - 1)]

    @cached_property
    def least_pages(self) -> int:
        return self.sink_pages + self.recent_pages

    def _budgets(self, cap: int | None) -> NDArray[np.int64]:
        """Total budget in pages of each bin, [bins]; `cap` is in tokens."""
        budgets = np.array(self.budget_pages)
        return budgets if cap is None else np.minimum(budgets, cap // self.page_size)

    def pages_read(self, pages: ArrayLike, cap: int | None = None) -> NDArray[np.int64]:
        """Pages that a sparse layer reads of `pages` cached ones, in their shape."""
        cached = np.asarray(pages, dtype=np.int64)
        budgets = self._budgets(cap)
        read = np.minimum(cached, budgets[np.minimum(cached // self.bin_pages, len(budgets) - 1)])
        dense_pages = self.dense_tokens // self.page_size if cap is None else 0
        return np.where(cached <= dense_pages, cached, read)

    def tokens_read(self, lengths: ArrayLike, cap: int | None = None) -> NDArray[np.int64]:
        """Cached tokens that a sparse layer reads per KV head, in the shape of `lengths`. It reads
        everything while that fits into its budget. The pages left out are full ones, never the
        last. `cap` is a request's upper bound in tokens."""
        cached = np.asarray(lengths, dtype=np.int64)
        pages = -(-cached // self.page_size)
        return cached - (pages - self.pages_read(pages, cap)) * self.page_size

    def first_sparse_length(self, cap: int | None = None) -> int:
        """Smallest length at which a page is left out."""
        dense_pages = self.dense_tokens // self.page_size if cap is None else 0
        for i, budget in enumerate(self._budgets(cap).tolist()):
            pages = max(i * self.bin_pages, budget + 1, dense_pages + 1)
            if pages < (i + 1) * self.bin_pages:
                break
        # The last bin has no upper edge.
        return (pages - 1) * self.page_size + 1

    def for_model(self, hf_config: Any) -> "BudgetSchedule":
        """The schedule as a server decodes this model by it. Layers with a sliding window read
        their window, whatever the budget, and those with linear attention their state: they join
        the dense layers, so that budgets and what is reported hold for the layers that keep the
        whole KV. Raises `ScheduleError` if dense_layers are for a model of another shape, or no
        layer would be sparse."""
        layers, partial = num_layers_of(hf_config), partial_layers(hf_config)
        kind = "linear attention" if linear_layers(hf_config) else "a sliding window"
        dense_layers = tuple(sorted({*self.dense_layers, *partial}))
        field = f"schedule {self.name}: dense_layers={quoted(list(self.dense_layers))}"
        if any(layer >= layers for layer in self.dense_layers):
            raise ScheduleError(f"{field}: the model has {layers} layers, 0 to {layers - 1}")
        if len(dense_layers) == layers:
            beside = f" beside its {len(partial)} layers with {kind}" if partial else ""
            raise ScheduleError(f"{field}: no layer of the model would be sparse{beside}")
        if set(partial) <= set(self.dense_layers):
            return self
        return self.model_copy(update={"dense_layers": dense_layers})

    def require_switch_from(self, first: "BudgetSchedule") -> None:
        """Raise `ScheduleError` unless a server that was started with `first` can be switched here.
        Page size, selection rule and dense layers decide which landmarks exist; sinks and recent
        pages are in graphs. Only budgets may differ."""
        for field in _FIXED:
            value, expected = getattr(self, field), getattr(first, field)
            if value != expected:
                raise ScheduleError(
                    f"schedule {self.name}: {field}={quoted(value)}: expected {quoted(expected)},"
                    f" as in the server's {first.name}"
                )

    def dense_below(self, tokens: int) -> "BudgetSchedule":
        """The schedule with `dense_tokens` of at least `tokens`."""
        return self.model_copy(update={"dense_tokens": max(tokens, self.dense_tokens)})

    def as_dense(self) -> "BudgetSchedule":
        """The schedule `DENSE`, to which a server that was started with this one can be switched:
        its budget is larger than any sequence."""
        return BudgetSchedule(**self.as_fixed(MAX_TOKENS).model_dump() | {"name": DENSE})

    def as_fixed(self, tokens: int) -> "BudgetSchedule":
        """fixed-<tokens> by this schedule's selection rule and dense layers, to which a server that
        was started with this one can be switched."""
        return BudgetSchedule.fixed(
            tokens,
            self.page_size,
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
            dense_layers=self.dense_layers,
            selection=self.selection,
        )

    @property
    def is_dense(self) -> bool:
        return self.budget_tokens[0] == MAX_TOKENS

    def describe_calibration(self, hf_config: Any) -> str:
        """Whether the budgets were calibrated for this model, in a few words on one line. A
        calibrated schedule without `model_match` counts as calibrated for any model."""
        if not self.calibrated:
            return "NOT calibrated"
        if self.is_foreign(hf_config):
            return f"calibrated for {cut(self.model or 'another model', 80)}, not for this model"
        return ", ".join(["calibrated", *self._weak_evidence()])

    def _weak_evidence(self) -> Iterator[str]:
        """Shortcomings of the calibration's evidence, as far as the schedule records it."""
        bins = self.provenance.get("bins")
        rows = [row for row in bins if isinstance(row, dict)] if isinstance(bins, list) else []
        measured = [row.get("tokens") for row in rows if row.get("basis") == "measured"]
        fewest = min((n for n in measured if isinstance(n, int) and n > 0), default=ENOUGH_TOKENS)
        if fewest < ENOUGH_TOKENS:
            yield f"thin: a bin of {fewest} tokens"
        extrapolated = sum(row.get("basis") == "extrapolated" for row in rows)
        if extrapolated:
            yield f"{extrapolated} of {len(rows)} bins extrapolated"

    def is_foreign(self, hf_config: Any) -> bool:
        return self.calibrated and bool(self.model_match) and not self.matches(hf_config)

    def matches(self, hf_config: Any) -> bool:
        """Whether `model_match` is there and fits the Hugging Face config (object or mapping)."""
        fields = self.model_match or {}
        return bool(fields) and all(model_value(hf_config, k) == v for k, v in fields.items())

    @classmethod
    def drafts(cls, page_size: int = PAGE_SIZE) -> "BudgetSchedule":
        """512 tokens and a 64th of the context, chosen by int4 landmarks in all layers. For
        lossless decoding; it needs no calibration."""
        budgets = tuple(512 + (index + 1) * 64 for index in range(64))
        return cls(
            name=DRAFTS,
            page_size=page_size,
            bin_tokens=4096,
            budget_tokens=budgets,
            dense_layers=(),
            selection=INT4,
        )

    @classmethod
    def fixed(cls, tokens: int, page_size: int = PAGE_SIZE, **fields: Any) -> "BudgetSchedule":
        """fixed-<tokens>; `fields` are further ones of the schedule."""
        fields |= {"page_size": page_size, "bin_tokens": page_size, "budget_tokens": (tokens,)}
        return cls(name=f"fixed-{tokens}", **fields)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "BudgetSchedule":
        """Raises `ScheduleError`, which names the file."""
        try:
            return cls(**read_object(path, "a schedule"))
        except ScheduleError as error:
            raise ScheduleError(f"{cut(str(path))}: {error}") from None
        except InputError as error:
            raise ScheduleError(str(error)) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON from which `from_json` reads an equal schedule; replaces `path` atomically."""
        write_json(Path(path), self.model_dump(mode="json"))


def int4_landmark_tokens(page_size: int) -> int:
    """Tokens of an int4 landmark: four, or more where a page would have more than eight."""
    # Landmarks of two tokens rank pages better, but a step reads twice as many.
    return max(4, page_size // _MOST_LANDMARKS)


def landmark_bytes(rule: SelectionRule, page_size: int, head_dim: int, mean_itemsize: int) -> int:
    """Bytes of the landmarks of one page and KV head; a number of a landmark that is not int4 takes
    `mean_itemsize` bytes."""
    if rule == INT4:
        return page_size // int4_landmark_tokens(page_size) * (head_dim // 2 + _SCALE_BYTES)
    return head_dim * mean_itemsize
