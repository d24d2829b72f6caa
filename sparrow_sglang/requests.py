"""What a single request may ask of sparse decode, and how it asks.

`sampling_params["custom_params"]["sparrow"]` of `Engine.generate` and of `/generate`; with the
OpenAI client `extra_body={"custom_params": {"sparrow": ...}}`, in chat and text completions. Its
value is one of

    {"dense": true}               every layer reads everything
    {"schedule": "m-0.92"}        another schedule that the server has loaded
    {"kv_budget_tokens": 1024}    the schedule in force, but never more than this many tokens

and beside one of them, or alone, {"report": true}: the answer says what was read and held, see
`sparrow_sglang.kv_usage`.

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.json_values import quoted
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

KEY = "sparrow"


class RequestOptionError(ValueError):
    """A request asks for something that there is not; the message says what is allowed."""


@dataclass(frozen=True)
class RequestOption:
    """What one request asked for; at most one of the first three fields is set.

    Attributes:
        dense: read everything in every layer.
        schedule: name of a loaded schedule to use instead of the one in force.
        kv_budget_tokens: upper bound of the budget, in tokens, sinks and recent pages included.
        report: say in the answer what was read and held.
    """

    dense: bool = False
    schedule: str | None = None
    kv_budget_tokens: int | None = None
    report: bool = False

    @classmethod
    def read(cls, custom_params: Any, loaded: LoadedSchedules) -> "RequestOption":
        """The option in a request's `custom_params`; the default where there is none.

        Raises:
            RequestOptionError: it is not one of the three forms, or names what is not loaded.
        """
        given = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
        if given is None:
            return DEFAULT
        if not isinstance(given, Mapping) or not given:
            raise RequestOptionError(_expected(given, loaded))
        report = given.get("report", False)
        rule = {key: value for key, value in given.items() if key != "report"}
        if len(rule) > 1 or not isinstance(report, bool):
            raise RequestOptionError(_expected(given, loaded))
        for key, value in rule.items():
            allowed = (
                (key == "dense" and isinstance(value, bool))
                or (key == "schedule" and isinstance(value, str) and value in loaded.names)
                or (key == "kv_budget_tokens" and _is_budget(value, loaded.in_force))
            )
            if not allowed:
                raise RequestOptionError(_expected(given, loaded))
        return cls(**rule, report=report)

    def first_sparse_length(self, loaded: LoadedSchedules) -> int | None:
        """Smallest length at which a page is left out, in tokens; None if there is none.

        Raises:
            ScheduleError: the schedule is not loaded.
        """
        if self.dense:
            return None
        schedule = loaded.in_force if self.schedule is None else loaded.get(self.schedule)
        first = schedule.first_sparse_length()
        if self.kv_budget_tokens is None:
            return first
        return min(first, self.kv_budget_tokens + 1)


DEFAULT = RequestOption()


def option_or_default(custom_params: Any, loaded: LoadedSchedules) -> RequestOption:
    """As `RequestOption.read`, for a process that can no longer refuse the request."""
    try:
        return RequestOption.read(custom_params, loaded)
    except (RequestOptionError, ScheduleError):
        return DEFAULT


def _floor(schedule: BudgetSchedule) -> int:
    return (schedule.sink_pages + schedule.recent_pages) * schedule.page_size


def _is_budget(value: Any, schedule: BudgetSchedule) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= _floor(schedule) and value % schedule.page_size == 0


def _expected(given: Any, loaded: LoadedSchedules) -> str:
    return (
        f'custom_params["{KEY}"]={quoted(given)} is not allowed: expected exactly one of'
        f' {{"dense": true}}, {{"schedule": one of {", ".join(loaded.names)}}} or'
        f' {{"kv_budget_tokens": a multiple of {loaded.in_force.page_size}, at least'
        f' {_floor(loaded.in_force)}}}; {{"report": true}} may stand beside it, or alone'
    )
