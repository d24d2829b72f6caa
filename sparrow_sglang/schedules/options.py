"""Options of sparse decode for a single request, and the report of what its steps read.

`sampling_params["custom_params"]["sparrow"]` of `Engine.generate` and of `/generate`; with the
OpenAI client `extra_body={"custom_params": {"sparrow": ...}}`, in chat and text completions. Its
value is one of

    {"dense": true}               every layer reads everything
    {"kv_budget_tokens": 1024}    the active schedule, but never more than this many tokens

and beside one of them, or alone, {"report": true}: answers carry a `KvUsage`, or of a lossless
server a `DraftUsage`, as `meta_info["sparrow"]` (`Engine.generate`, `/generate`) or, one per
choice, `metadata["sparrow"]` (chat and text completions; while streaming, in a last chunk without
choices, that of the usage if requested)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import quoted
from sparrow_sglang.schedules.schedule import MAX_TOKENS, BudgetSchedule
from sparrow_sglang.validation import nearest_first

KEY = "sparrow"
_FIELD = f'custom_params["{KEY}"]'
_ALLOWED = "dense, kv_budget_tokens or report"
_MISSPELT = 0.85
"""Similarity to `KEY` from which another key is taken for it."""
RETRACTED = "sparrow_retracted"
"""Name in SGLang's `meta_info` of what the scheduler says of retractions to those who report."""
ATTRIBUTE = "sparrow"
"""Attribute of SGLang's objects, requests and the TokenizerManager, that holds our state."""


class RequestError(InputError):
    """A request is invalid; the message says what is allowed."""


@dataclass(frozen=True)
class KvUsage:
    """What the decode steps of one request read, per KV head of a sparse layer, in tokens.

    The first token comes out of prefill, so T tokens take T - 1 decode steps, less one for each
    retraction, whose first token comes out of a prefill, too. Layers of the schedule's
    `dense_layers` read all that is cached.

    Attributes:
        schedule: name of the schedule that the request was decoded by; None if densely.
        kv_budget_tokens: the upper bound that the request set, if it did.
        decode_steps: number of steps.
        kv_tokens_cached_mean: tokens in the KV cache, the current one included, mean over the
            steps, to a tenth; None without a step, as the following.
        kv_tokens_read_mean: those of them that were read, mean over the steps, to a tenth.
        kv_tokens_cached_last: tokens in the KV cache at the last step.
        kv_tokens_read_last: those of them that the last step read.
        kv_budget_last: the budget of the last step; None if the request was decoded densely.
    """

    schedule: str | None
    kv_budget_tokens: int | None
    decode_steps: int
    kv_tokens_cached_mean: float | None = None
    kv_tokens_read_mean: float | None = None
    kv_tokens_cached_last: int | None = None
    kv_tokens_read_last: int | None = None
    kv_budget_last: int | None = None


@dataclass(frozen=True)
class DraftUsage:
    """What the rounds of one request drafted.

    Attributes:
        schedule: name of the drafts' schedule; None if they were dense.
        kv_budget_tokens: the upper bound that the request set, if it did.
        rounds: verifications, and dense steps where none was drafted.
        drafts: tokens drafted.
        accepted_drafts: those of them that were accepted.
    """

    schedule: str | None
    kv_budget_tokens: int | None
    rounds: int
    drafts: int
    accepted_drafts: int


@dataclass(frozen=True)
class RequestOption:
    """How one request is decoded, as long as it runs.

    Attributes:
        schedule: None to read everything in every layer.
        kv_budget_tokens: upper bound of the budget, in tokens, sinks and recent pages included.
    """

    schedule: BudgetSchedule | None
    kv_budget_tokens: int | None = None
    report: bool = False

    @classmethod
    def read(cls, custom_params: Any, active: BudgetSchedule) -> "RequestOption":
        """The option in a request's `custom_params`. Raises `RequestError`."""
        given = custom_params if isinstance(custom_params, Mapping) else {}
        option = given.get(KEY)
        if option is None:
            # Other keys are for custom logit processors.
            for key in given.keys() - {KEY}:
                if nearest_first(str(key), [KEY], _MISSPELT):
                    raise RequestError(f"custom_params[{quoted(key)}]: did you mean {KEY!r}?")
            return cls(active)
        if not isinstance(option, Mapping) or not option:
            raise RequestError(
                f"{_FIELD}={quoted(option)}: expected an object with one of {_ALLOWED}"
            )
        for key, value in option.items():
            if (problem := _problem(key, value, active)) is not None:
                raise RequestError(f"{_FIELD}[{quoted(key, 60)}]={quoted(value)}: {problem}")
        if {"dense", "kv_budget_tokens"} <= option.keys():
            raise RequestError(
                f"{_FIELD}={quoted(option)}: expected one of dense and kv_budget_tokens"
            )
        return cls(
            None if option.get("dense") else active,
            option.get("kv_budget_tokens"),
            option.get("report", False),
        )

    def first_sparse_length(self) -> int | None:
        """Smallest length at which a page is left out, in tokens; None if there is none."""
        if self.schedule is None:
            return None
        return self.schedule.first_sparse_length(self.kv_budget_tokens)

    def tokens_read(self, cached: ArrayLike) -> NDArray[np.int64]:
        """KV tokens that a sparse layer reads of `cached` ones in a step, in their shape."""
        if self.schedule is None:
            return np.asarray(cached, dtype=np.int64)
        return self.schedule.tokens_read(cached, self.kv_budget_tokens)

    def usage(
        self, prompt_tokens: int, completion_tokens: int, retracted: Iterable[int] = ()
    ) -> KvUsage:
        """`retracted`: the tokens that the response had at each retraction."""
        name = None if self.schedule is None else self.schedule.name
        decoded = np.setdiff1d(np.arange(1, completion_tokens), list(retracted))
        if not len(decoded):
            return KvUsage(name, self.kv_budget_tokens, 0)
        cached = prompt_tokens + decoded
        read = self.tokens_read(cached)
        return KvUsage(
            schedule=name,
            kv_budget_tokens=self.kv_budget_tokens,
            decode_steps=len(decoded),
            kv_tokens_cached_mean=round(float(cached.mean()), 1),
            kv_tokens_read_mean=round(float(read.mean()), 1),
            kv_tokens_cached_last=int(cached[-1]),
            kv_tokens_read_last=int(read[-1]),
            kv_budget_last=self._budget(int(cached[-1])),
        )

    def _budget(self, cached: int) -> int | None:
        """The budget of a step over `cached` tokens; None if it is dense."""
        if self.schedule is None:
            return None
        cap, schedule = self.kv_budget_tokens, self.schedule
        if cap is None and (schedule.is_dense or cached <= schedule.dense_tokens):
            return None
        budget = schedule.budget_at(cached)
        return budget if cap is None else min(budget, cap)


@dataclass
class RequestState:
    """State that the launching process keeps for one `GenerateReqInput`, and for its copies.
    `reports` are `meta_info` of the finished answers that carry a report, by their index."""

    option: RequestOption | None = None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


def request_state(request: Any) -> RequestState:
    if getattr(request, ATTRIBUTE, None) is None:
        setattr(request, ATTRIBUTE, RequestState())
    return getattr(request, ATTRIBUTE)


def _problem(key: Any, value: Any, active: BudgetSchedule) -> str | None:
    if key in ("dense", "report"):
        return None if isinstance(value, bool) else "expected true or false"
    if key == "schedule":
        return "expected none: requests share the server's schedule, which set_schedule switches"
    if key != "kv_budget_tokens":
        return f"unknown: expected {_ALLOWED}"
    page_size = active.page_size
    floor = active.least_pages * page_size
    if not isinstance(value, int) or isinstance(value, bool):
        return f"expected a whole number of tokens, a multiple of {page_size}"
    # Budgets are added up in 64 bits, and SGLang passes on larger numbers than that.
    if not floor <= value <= MAX_TOKENS:
        return f"expected {floor} tokens, the first and last pages, to {MAX_TOKENS}"
    return f"expected a multiple of the page size, {page_size}" if value % page_size else None
