"""The KV budget of sparse decode as a function of sequence length.

In: a shipped name, a JSON file or a fixed number of tokens. Out: a frozen `BudgetSchedule`, whose
answers depend on host-side lengths only. Imports neither torch nor SGLang.
"""

import json
import os
import re
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_serializer,
    model_validator,
)

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import (
    MAX_DEPTH,
    JsonError,
    cut,
    quoted,
    relative_note,
    require_portable,
)
from sparrow_sglang.selection import SelectionRule, weighted_pages
from sparrow_sglang.validation import first_problem, nearest_first

PAGE_SIZES = (16, 32, 64)
PAGE_SIZE = 16
"""Tokens per page where nothing else is chosen."""
PREFERRED_TAIL_TARGET = 0.86
_MEAN_WEIGHT_TOLERANCE = 1e-3
# Tables on the device hold whole numbers of 32 bits.
MAX_TOKENS = 2**30
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FIXED_NAME = re.compile(r"fixed-([0-9]+)")

_Count = Annotated[StrictInt, Field(le=MAX_TOKENS)]
_EXPECTED = {
    "name": "a string of 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first",
    "page_size": f"one of {PAGE_SIZES}",
    "bin_tokens": f"a whole number of tokens, a multiple of page_size, at most {MAX_TOKENS}",
    "budget_tokens": "a list with one whole number of tokens per bin, multiples of page_size,"
    f" at most {MAX_TOKENS}",
    "sink_pages": f"a whole number, 0 or more, at most {MAX_TOKENS}",
    "recent_pages": f"a whole number, 1 or more, at most {MAX_TOKENS}",
    "dense_layers": "a list of layer indices",
    "calibrated": "true or false",
    "model": "a string or null",
    "tail_target": "a number above 0 and at most 1, or null",
    "model_match": "an object of Hugging Face config fields (numbers, strings, lists), or null",
    "provenance": f"an object, nested at most {MAX_DEPTH} deep",
}


class ScheduleError(InputError):
    """A schedule cannot be used; the message names file, field, value and what is allowed."""


class BudgetSchedule(BaseModel):
    """Sequence length -> total KV budget, sinks and recent pages included.

    A sequence of L cached tokens (the current one included) fills n = ceil(L / page_size) pages and
    falls into bin min(n // bin_pages, last bin). Raises `ScheduleError` on construction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: StrictStr = Field(pattern=rf"^{NAME.pattern}\z")
    page_size: StrictInt
    bin_tokens: _Count = Field(gt=0)
    budget_tokens: tuple[_Count, ...] = Field(min_length=1)
    sink_pages: _Count = Field(default=1, ge=0)
    recent_pages: _Count = Field(default=2, ge=1)
    dense_layers: tuple[_Count, ...] = (0, 1)
    selection: Annotated[SelectionRule, BeforeValidator(SelectionRule.read)] = SelectionRule()
    calibrated: StrictBool = False
    model: StrictStr | None = None
    tail_target: float | None = Field(default=None, gt=0, le=1, strict=True)
    model_match: dict[str, StrictInt | StrictStr | list[StrictStr]] | None = None
    provenance: dict[str, JsonValue] = Field(default_factory=dict)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ScheduleError(first_problem(error, type(self), _EXPECTED)) from None

    @model_validator(mode="after")
    def _check(self) -> "BudgetSchedule":
        page = self.page_size
        if page not in PAGE_SIZES:
            raise ValueError(
                f"page_size={quoted(page)} is not supported: expected one of {PAGE_SIZES}"
            )
        if self.bin_tokens % page:
            raise ValueError(_not_whole_pages("bin_tokens", self.bin_tokens, page))
        floor = self.least_pages * page
        for i, tokens in enumerate(self.budget_tokens):
            if tokens < floor:
                raise ValueError(
                    f"budget_tokens[{i}]={tokens} is below the pages that are always kept: expected"
                    f" at least {floor} (sink_pages={self.sink_pages} plus"
                    f" recent_pages={self.recent_pages}, of {page} tokens each)"
                )
            if tokens % page:
                raise ValueError(_not_whole_pages(f"budget_tokens[{i}]", tokens, page))
            if i and tokens < self.budget_tokens[i - 1]:
                raise ValueError(
                    f"budget_tokens[{i}]={tokens} is below budget_tokens[{i - 1}]="
                    f"{self.budget_tokens[i - 1]}: budgets must not fall with length, expected at"
                    f" least {self.budget_tokens[i - 1]}"
                )
        layers = self.dense_layers
        if any(layer < 0 for layer in layers) or len(set(layers)) != len(layers):
            raise ValueError(
                f"dense_layers={quoted(list(layers))}: expected distinct layer indices from 0"
                " upwards"
            )
        self._check_selection()
        for field in ("model", "model_match", "provenance"):
            try:
                require_portable(getattr(self, field))
            except JsonError as error:
                raise ValueError(f"{field}: {error}") from None
        return self

    def _check_selection(self) -> None:
        tokens = self.selection.landmark_tokens
        if tokens is not None and self.page_size % tokens:
            raise ValueError(
                f"selection.landmark_tokens={tokens}: expected a divisor of"
                f" page_size={self.page_size}, or null"
            )
        if self.selection.layer_weights is None:
            return
        weights = self.sparse_weights
        mean = sum(weights) / max(1, len(weights))
        if abs(mean - 1) > _MEAN_WEIGHT_TOLERANCE:
            raise ValueError(
                "selection.layer_weights: their mean without"
                f" dense_layers={quoted(list(self.dense_layers))} is {mean:.6g}: expected 1, so"
                " that sparse layers read the budget on average"
            )

    @model_serializer(mode="wrap")
    def _without_published_rule(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the published rule, which files of earlier versions say nothing of."""
        fields: dict[str, Any] = handler(self)
        if self.selection == SelectionRule():
            fields.pop("selection", None)
        return fields

    @cached_property
    def sparse_weights(self) -> tuple[float, ...]:
        """Weights of the layers that are not dense; a single 1 stands for any number of them."""
        weights = self.selection.layer_weights
        if weights is None:
            return (1.0,)
        return tuple(w for layer, w in enumerate(weights) if layer not in self.dense_layers)

    def layer_weight(self, layer: int) -> float:
        weights = self.selection.layer_weights
        return 1.0 if weights is None else weights[layer]

    @cached_property
    def bin_pages(self) -> int:
        return self.bin_tokens // self.page_size

    @cached_property
    def budget_pages(self) -> tuple[int, ...]:
        return tuple(tokens // self.page_size for tokens in self.budget_tokens)

    def num_pages(self, seq_len: int) -> int:
        """Pages that `seq_len` cached tokens fill, the partial one included."""
        return -(-seq_len // self.page_size)

    def bin_index(self, seq_len: int) -> int:
        return min(self.num_pages(seq_len) // self.bin_pages, len(self.budget_tokens) - 1)

    def kv_budget_tokens(self, seq_len: int) -> int:
        """Total budget in tokens at `seq_len` cached tokens; may exceed `seq_len`."""
        return self.budget_tokens[self.bin_index(seq_len)]

    @cached_property
    def least_pages(self) -> int:
        """Sinks and recent pages, which are always kept."""
        return self.sink_pages + self.recent_pages

    def layer_budgets(self, weight: float = 1.0, cap: int | None = None) -> NDArray[np.int64]:
        """Total budget in pages of a sparse layer of this weight, [bins]; `cap` is in tokens."""
        budgets = np.array(self.budget_pages)
        if cap is not None:
            budgets = np.minimum(budgets, cap // self.page_size)
        return weighted_pages(budgets, weight, self.least_pages)

    def pages_read(
        self, pages: ArrayLike, weight: float = 1.0, cap: int | None = None
    ) -> NDArray[np.int64]:
        """Pages that a sparse layer of this weight reads of `pages` cached ones, in their shape."""
        cached = np.asarray(pages, dtype=np.int64)
        budgets = self.layer_budgets(weight, cap)
        return np.minimum(cached, budgets[np.minimum(cached // self.bin_pages, len(budgets) - 1)])

    def tokens_read(self, lengths: ArrayLike, cap: int | None = None) -> NDArray[np.int64]:
        """Cached tokens that a sparse layer reads per KV head, in the shape of `lengths`.

        The mean over the sparse layers, rounded down, so that it is below the length wherever any
        of them leaves a page out. A layer reads everything while it fits into its budget. The pages
        left out are full ones, never the last.

        Args:
            lengths: cached tokens, the current one included.
            cap: upper bound of the budget in tokens, as a request may ask for.
        """
        cached = np.asarray(lengths, dtype=np.int64)
        pages = -(-cached // self.page_size)
        weights = self.sparse_weights
        read = sum(self.pages_read(pages, weight, cap) for weight in weights)
        left_out = len(weights) * pages - read
        return cached - -(-left_out * self.page_size // len(weights))

    def first_sparse_length(self, cap: int | None = None, weight: float | None = None) -> int:
        """Smallest length at which a page is left out; decode at shorter lengths is dense.

        Args:
            cap: upper bound of the budget in tokens, as a request may ask for.
            weight: that of a layer, to ask for this layer alone.
        """
        budgets = self.layer_budgets(min(self.sparse_weights) if weight is None else weight, cap)
        last = len(budgets) - 1
        for i, budget in enumerate(budgets.tolist()):
            pages = max(i * self.bin_pages, budget + 1)
            if i == last or pages < (i + 1) * self.bin_pages:
                return (pages - 1) * self.page_size + 1
        raise AssertionError("the last bin has no upper edge, so the loop returns")

    def require_model(self, hf_config: Any) -> None:
        """Raise `ScheduleError` if the selection rule is for a model of another shape.

        `hf_config` is the model's Hugging Face config, an object or a mapping.
        """
        layers = _config_value(_text_config(hf_config), "num_hidden_layers")
        weights, pairs = self.selection.layer_weights, self.selection.landmark_pairs
        if weights is not None and len(weights) != layers:
            raise ScheduleError(
                f"schedule {self.name}: selection.layer_weights has {len(weights)} numbers:"
                f" expected one for each of the model's {layers} layers"
            )
        if pairs is not None and pairs > (head_dim := head_dim_of(hf_config)) // 2:
            raise ScheduleError(
                f"schedule {self.name}: selection.landmark_pairs={pairs}: expected at most"
                f" {head_dim // 2}, as the model's heads have {head_dim} dimensions"
            )

    def calibration(self, hf_config: Any) -> str:
        """Whether the budgets were calibrated for this model, in a few words on one line.

        `hf_config` is the model's Hugging Face config, an object or a mapping. A schedule without
        `model_match` is taken at its word.
        """
        if not self.calibrated:
            return "NOT calibrated"
        if self.is_foreign(hf_config):
            return f"calibrated for {_shown_model(self.model)}, not for this model"
        return "calibrated"

    def is_foreign(self, hf_config: Any) -> bool:
        """Whether the budgets were calibrated, but for another model than that of `hf_config`."""
        return self.calibrated and bool(self.model_match) and not _matches(self, hf_config)

    @classmethod
    def fixed(cls, tokens: int, page_size: int = PAGE_SIZE) -> "BudgetSchedule":
        """The same budget of `tokens` at every length."""
        name = f"fixed-{tokens}"
        try:
            return cls(
                name=name, page_size=page_size, bin_tokens=page_size, budget_tokens=(tokens,)
            )
        except ScheduleError as error:
            raise ScheduleError(f"schedule {name}: {error}") from None

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "BudgetSchedule":
        where = cut(str(path))
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ScheduleError(f"{where}: not UTF-8 text; expected a JSON object") from None
        except IsADirectoryError:
            raise ScheduleError(
                f"{where}: is a directory; expected a schedule file (.json)"
            ) from None
        except OSError as error:
            raise ScheduleError(
                f"{where}{relative_note(path)}: cannot be read ({error.strerror}); expected a"
                " schedule file (.json),"
                " fixed-<tokens>, or a shipped schedule, such as"
                f" {', '.join(nearest_first(where, known_schedules())[:5])}"
            ) from None
        except ValueError as error:
            # A NUL in the path.
            raise ScheduleError(
                f"{where!r}: cannot be read ({error}); expected a schedule file (.json)"
            ) from None
        if not text.strip():
            raise ScheduleError(f"{where}: the file is empty; expected a JSON object")
        try:
            fields = json.loads(text)
        except RecursionError:
            raise ScheduleError(f"{where}: nested too deeply; expected a JSON object") from None
        except ValueError as error:
            # Also a number of more digits than Python reads.
            raise ScheduleError(f"{where}: not JSON ({error}); expected a JSON object") from None
        if not isinstance(fields, dict):
            raise ScheduleError(
                f"{where}: holds a {type(fields).__name__}; expected a JSON object with the keys"
                f" {', '.join(cls.model_fields)}"
            )
        try:
            return cls(**fields)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON that `from_json` reads back equal; replaces `path` in one step."""
        write_json(Path(path), self.model_dump(mode="json"))


def head_dim_of(hf_config: Any) -> int:
    """Dimensions of a model's heads, by its Hugging Face config (object or mapping)."""
    text = _text_config(hf_config)
    head_dim: int = _config_value(text, "head_dim") or (
        _config_value(text, "hidden_size") // _config_value(text, "num_attention_heads")
    )
    return head_dim


def _text_config(hf_config: Any) -> Any:
    return _config_value(hf_config, "text_config") or hf_config


def known_schedules() -> list[str]:
    """Names of the shipped schedules, sorted."""
    folder = files("sparrow_sglang.schedules")
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def load_schedule(spec: str, page_size: int) -> BudgetSchedule:
    """The schedule that `spec` names: a shipped name, a path to .json, or fixed-<tokens>.

    Raises `ScheduleError` if there is none, if it is invalid or if it was made for another page
    size than the server's `page_size`.
    """
    if match := FIXED_NAME.fullmatch(spec):
        if len(match[1]) > len(str(MAX_TOKENS)):
            raise ScheduleError(f"schedule {quoted(spec)}: expected at most fixed-{MAX_TOKENS}")
        return BudgetSchedule.fixed(int(match[1]), page_size)
    if spec in known_schedules():
        return _for_page_size(shipped_schedule(spec), page_size, spec)
    if spec.endswith(".json") or os.sep in spec or os.path.exists(spec):
        return _for_page_size(BudgetSchedule.from_json(spec), page_size, spec)
    raise ScheduleError(
        f"schedule {quoted(spec, 60)} is not known: expected a path to a .json file,"
        f" fixed-<tokens>, or one of {', '.join(nearest_first(spec, known_schedules()))}"
    )


def schedule_for_model(hf_config: Any, page_size: int) -> BudgetSchedule:
    """The shipped schedule whose `model_match` fits the Hugging Face config (object or mapping).

    Prefers the tail target 0.86. Raises `ScheduleError` if none fits.
    """
    shipped = [shipped_schedule(name) for name in known_schedules()]
    fitting = [schedule for schedule in shipped if _matches(schedule, hf_config)]
    if not fitting:
        fields = ("architectures", "hidden_size", "num_hidden_layers")
        got = ", ".join(f"{key}={quoted(_config_value(hf_config, key))}" for key in fields)
        raise ScheduleError(
            f"no shipped schedule fits this model ({got}): choose one with --sparrow-schedule, a"
            f" path to a .json file, fixed-<tokens> (not calibrated), or one of"
            f" {', '.join(known_schedules())}"
        )
    best = min(fitting, key=lambda s: abs((s.tail_target or 0.0) - PREFERRED_TAIL_TARGET))
    return _for_page_size(best, page_size, best.name)


@cache
def shipped_schedule(name: str) -> BudgetSchedule:
    """The shipped schedule of that name, one of `known_schedules()`."""
    return BudgetSchedule.from_json(str(files("sparrow_sglang.schedules") / f"{name}.json"))


def _for_page_size(schedule: BudgetSchedule, page_size: int, spec: str) -> BudgetSchedule:
    if schedule.page_size != page_size:
        raise ScheduleError(
            f"{spec}: page_size={schedule.page_size}, but the server runs with page size"
            f" {page_size}: pass --page-size {schedule.page_size}, or a schedule made for"
            f" {page_size}"
        )
    return schedule


def _matches(schedule: BudgetSchedule, hf_config: Any) -> bool:
    wanted = schedule.model_match or {}
    return bool(wanted) and all(_config_value(hf_config, k) == v for k, v in wanted.items())


def _shown_model(name: str | None) -> str:
    if not name:
        return "another model"
    return (name if name.isprintable() else ascii(name))[:80]


def _config_value(hf_config: Any, key: str) -> Any:
    if isinstance(hf_config, Mapping):
        return hf_config.get(key)
    return getattr(hf_config, key, None)


def _not_whole_pages(field: str, tokens: int, page_size: int) -> str:
    below = tokens // page_size * page_size
    near = f"{below} or {below + page_size}" if below else f"{page_size}"
    return f"{field}={tokens} is not a multiple of page_size={page_size}: nearest allowed is {near}"
