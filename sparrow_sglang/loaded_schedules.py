"""The schedules that one server holds: the active one, and those that requests may name.

Imports neither torch nor SGLang: the launching process checks requests against this, and every
scheduler keeps the same in tables on its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparrow_sglang.json_values import quoted
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

MAX_LOADED = 14
MAX_BINS = 1024
_SHARED = ("page_size", "sink_pages", "recent_pages")


def _shared_fields(schedule: BudgetSchedule) -> dict[str, Any]:
    """The values that all schedules of a server must have in common, by field."""
    rule = schedule.selection.model_dump(exclude={"layer_weights"})
    return {field: getattr(schedule, field) for field in _SHARED} | {
        f"selection.{field}": value for field, value in rule.items()
    }


@dataclass(frozen=True)
class LoadedSchedules:
    """Schedules that fit together.

    Attributes:
        active: the schedule by which requests are decoded unless they ask for another.
        named: the schedules that were loaded by name, in the order in which they were given.
        weighted_layers: number of layers that the device's tables tell apart, as many as the layer
            weights of one of the first schedules; None where none of them had any.
        dense_layers: those of the first schedule, which have no landmarks.
    """

    active: BudgetSchedule
    named: tuple[BudgetSchedule, ...] = ()
    weighted_layers: int | None = None
    dense_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, schedules: Sequence[BudgetSchedule]) -> "LoadedSchedules":
        """All of `schedules` by name, the first one active.

        Raises:
            ScheduleError: too many of them, two of one name, or some that do not fit the first.
        """
        if len(schedules) > MAX_LOADED:
            raise ScheduleError(
                f"{len(schedules)} schedules: expected at most {MAX_LOADED}; load fewer"
            )
        names = [schedule.name for schedule in schedules]
        for name in names:
            if names.count(name) > 1:
                raise ScheduleError(f"schedule {name!r} is named twice: expected distinct names")
        weights = (schedule.selection.layer_weights for schedule in schedules)
        layers = next((len(values) for values in weights if values is not None), None)
        loaded = cls(schedules[0], tuple(schedules), layers, schedules[0].dense_layers)
        for schedule in schedules:
            loaded.require_fit(schedule)
        return loaded

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a request may use, that of the active schedule first."""
        return tuple(dict.fromkeys([self.active.name, *(schedule.name for schedule in self.named)]))

    def get(self, name: str) -> BudgetSchedule:
        """The schedule of that name; raises `ScheduleError`, with the names there are."""
        for schedule in (*self.named, self.active):
            if schedule.name == name:
                return schedule
        raise ScheduleError(
            f"schedule {quoted(name)} is not loaded: expected one of {', '.join(self.names)}"
        )

    def require_fit(self, schedule: BudgetSchedule) -> None:
        """Raise `ScheduleError` unless `schedule` may be used beside the active one.

        Page size and the selection rule decide which landmarks exist, and all requests of a batch
        share sinks and recent pages. Of the rule only layer weights may differ, as they are stored
        on the device beside the budgets, in tables for as many layers as the server started with.
        With such tables further layers may be dense; these have landmarks, but read all pages.
        """
        without, dense = list(self.dense_layers), list(schedule.dense_layers)
        more = self.weighted_layers is not None and set(dense) >= set(without)
        if dense != without and not more:
            raise ScheduleError(
                f"schedule {schedule.name}: dense_layers={quoted(dense)} differs from that of"
                f" {self.named[0].name}: expected {quoted(without)}"
                f"{' or more' if self.weighted_layers else ''}; serve it with a server of its own"
            )
        shared = _shared_fields(self.active)
        for field, got in _shared_fields(schedule).items():
            expected = shared[field]
            expected, got = (list(v) if isinstance(v, tuple) else v for v in (expected, got))
            if got != expected:
                raise ScheduleError(
                    f"schedule {schedule.name}: {field}={quoted(got)} differs from that of"
                    f" {self.active.name}: expected {quoted(expected)}; serve it with a"
                    " server of its own"
                )
        weights = schedule.selection.layer_weights
        if weights is not None and len(weights) != self.weighted_layers:
            count = self.weighted_layers
            raise ScheduleError(
                f"schedule {schedule.name}: selection.layer_weights has {len(weights)} numbers:"
                f" expected {f'{count}, as others have' if count else 'null, as others have none'};"
                " serve it with a server of its own"
            )
        if len(schedule.budget_tokens) > MAX_BINS:
            raise ScheduleError(
                f"schedule {schedule.name}: {len(schedule.budget_tokens)} bins: expected at most"
                f" {MAX_BINS}; choose a larger bin_tokens"
            )

    def with_active(self, schedule: BudgetSchedule) -> "LoadedSchedules":
        """A copy with `schedule` active, which also replaces the loaded schedule of its name.

        Raises:
            ScheduleError: it does not fit.
        """
        self.require_fit(schedule)
        named = tuple(schedule if other.name == schedule.name else other for other in self.named)
        return replace(self, active=schedule, named=named)
