"""Schedules by name: shipped ones, JSON files, and the same budget at every length."""

import os
import re
from functools import cache
from importlib.resources import files
from typing import Any

from sparrow_sglang.hf_config import model_value
from sparrow_sglang.json_values import quoted
from sparrow_sglang.schedules.schedule import (
    DRAFTS,
    INT4,
    BudgetSchedule,
    ScheduleError,
)
from sparrow_sglang.validation import nearest_first

SCHEDULE_VARIABLE = "SPARROW_SCHEDULE"
AUTO = "auto"
PREFERRED_TAIL_TARGET = 0.86
_FIXED_NAME = re.compile(r"fixed-([0-9]{1,10})")


def known_schedules() -> list[str]:
    names = [entry.name for entry in files("sparrow_sglang.schedules").iterdir()]
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def schedule_spec(flag: str | None, auto: str) -> str:
    """--sparrow-schedule, else SPARROW_SCHEDULE, else `auto`, as for a value of "auto"."""
    spec = str(os.environ.get(SCHEDULE_VARIABLE) or AUTO if flag is None else flag)
    return auto if spec == AUTO else spec


def load_schedule(spec: str, page_size: int) -> BudgetSchedule:
    """The schedule that `spec` names: a shipped name, a path to .json, fixed-<tokens> or drafts.
    Raises `ScheduleError` if there is none, if it is invalid or made for another page size."""
    if (tokens := fixed_tokens(spec)) is not None:
        return BudgetSchedule.fixed(tokens, page_size)
    if spec == DRAFTS:
        return BudgetSchedule.drafts(page_size)
    named = spec in known_schedules()
    if named or spec.endswith(".json") or os.sep in spec or os.path.exists(spec):
        return _for_page_size(read_schedule(spec), page_size, spec)
    nearest = nearest_first(spec, known_schedules())[:8]
    raise ScheduleError(
        f"schedule {quoted(spec, 60)} is not known: expected a path to a .json file,"
        f" fixed-<tokens>, {DRAFTS}, or a name that `sparrow schedules` lists; the nearest are"
        f" {', '.join(nearest)}"
    )


def fixed_tokens(spec: str) -> int | None:
    """The number in fixed-<tokens>, None for other specs."""
    match = _FIXED_NAME.fullmatch(spec)
    return int(match[1]) if match else None


def read_schedule(spec: str) -> BudgetSchedule:
    """The schedule of a shipped name or of a file, whatever its page size. Raises `ScheduleError`
    if there is none or it is invalid."""
    if spec in known_schedules():
        return shipped_schedule(spec)
    return BudgetSchedule.from_json(spec)


def schedule_for_model(
    hf_config: Any, page_size: int, setting: str = "--sparrow-schedule"
) -> BudgetSchedule:
    """The shipped schedule whose `model_match` fits the Hugging Face config (object or mapping).
    Prefers the tail target 0.86, then the int4 rule. Raises `ScheduleError`
    if none fits, which says to name one with `setting`."""
    shipped = [shipped_schedule(name) for name in known_schedules()]
    fitting = [schedule for schedule in shipped if schedule.matches(hf_config)]
    if not fitting:
        fields = ("architectures", "hidden_size", "num_hidden_layers")
        values = ", ".join(f"{key}={quoted(model_value(hf_config, key))}" for key in fields)
        raise ScheduleError(
            f"no schedule is shipped for this model ({values}): make one with `sparrow calibrate"
            f" --model-path MODEL` and name its file with {setting}, or try {setting} fixed-4096,"
            " which is not calibrated; `sparrow schedules` lists the models that have one"
        )

    def distance(schedule: BudgetSchedule) -> tuple[float, bool]:
        off_target = abs((schedule.tail_target or 0.0) - PREFERRED_TAIL_TARGET)
        return off_target, schedule.selection != INT4

    best = min(fitting, key=distance)
    return _for_page_size(best, page_size, best.name)


@cache
def shipped_schedule(name: str) -> BudgetSchedule:
    return BudgetSchedule.from_json(str(files("sparrow_sglang.schedules") / f"{name}.json"))


def _for_page_size(schedule: BudgetSchedule, page_size: int, spec: str) -> BudgetSchedule:
    if schedule.page_size != page_size:
        raise ScheduleError(
            f"{spec}: page_size={schedule.page_size}, but the server runs with page size"
            f" {page_size}: pass --page-size {schedule.page_size}, or another schedule"
        )
    return schedule
