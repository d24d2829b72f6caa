"""What a single request may ask of sparse decode, and how it asks.

`sampling_params["custom_params"]["sparrow"]` of `Engine.generate` and of `/generate`; with the
OpenAI client `extra_body={"custom_params": {"sparrow": ...}}`, in chat and text completions. Its
value is one of

    {"dense": true}               every layer reads everything
    {"schedule": "m-0.92"}        another schedule that the server has loaded
    {"kv_budget_tokens": 1024}    the schedule in force, but never more than this many tokens

Imports neither torch nor SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

KEY = "sparrow"


class RequestOptionError(ValueError):
    """A request asks for something that there is not; the message says what is allowed."""


@dataclass(frozen=True)
class RequestOption:
    """What one request asked for; at most one of the fields is set.

    Attributes:
        dense: read everything in every layer.
        schedule: name of a loaded schedule to use instead of the one in force.
        kv_budget_tokens: upper bound of the budget, in tokens, sinks and recent pages included.
    """

    dense: bool = False
    schedule: str | None = None
    kv_budget_tokens: int | None = None

    @classmethod
    def read(cls, custom_params: Any, loaded: LoadedSchedules) -> "RequestOption":
        """The option in a request's `custom_params`; the default where there is none.

        Raises:
            RequestOptionError: it is not one of the three forms, or names what is not loaded.
        """
        given = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
        if given is None:
            return DEFAULT
        if not isinstance(given, Mapping) or len(given) != 1:
            raise RequestOptionError(_expected(given, loaded))
        [(key, value)] = given.items()
        if key == "dense" and isinstance(value, bool):
            return cls(dense=value)
        if key == "schedule" and isinstance(value, str) and value in loaded.names:
            return cls(schedule=value)
        if key == "kv_budget_tokens" and _is_budget(value, loaded.in_force):
            return cls(kv_budget_tokens=value)
        raise RequestOptionError(_expected(given, loaded))

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
        f'custom_params["{KEY}"]={given!r} is not allowed: expected exactly one of'
        f' {{"dense": true}}, {{"schedule": one of {", ".join(loaded.names)}}} or'
        f' {{"kv_budget_tokens": a multiple of {loaded.in_force.page_size}, at least'
        f" {_floor(loaded.in_force)}}}"
    )
