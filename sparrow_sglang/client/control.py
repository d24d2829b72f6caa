"""Read and switch the KV budget schedule of a running engine or server.

Over HTTP this is GET and POST /sparrow/schedule.
"""

import os
import warnings
from typing import Any

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.schedule import BudgetSchedule


def get_schedule(target: Any, *, api_key: str | None = None) -> BudgetSchedule:
    """The active schedule.

    Args:
        target: an `sglang.Engine` or a server's base URL.
        api_key: the server's --admin-api-key, or else --api-key, if it has one.

    Raises:
        EndpointError: the server is gone, or serves without this backend.
    """
    answer = connect(target, api_key).call_sparrow("schedule")
    return BudgetSchedule(**answer["schedule"])


def set_schedule(
    target: Any,
    schedule: BudgetSchedule | str,
    *,
    api_key: str | None = None,
    timeout_s: float | None = None,
) -> BudgetSchedule:
    """Make another schedule active, without a restart, and return the previous one.

    The server holds new requests back and waits for the running ones. The prefix cache is kept, as
    it holds dense KV only.

    Args:
        target: an `sglang.Engine` or a server's base URL.
        schedule: a schedule; or the name of a shipped one or of that with which the server was
            started, fixed-<tokens>, "dense" for dense decode, or the path of a .json file on this
            machine. Page size, sinks, recent pages and landmarks must be those of the schedule with
            which the server was started, and its dense layers must be dense.
        api_key: as in `get_schedule`.
        timeout_s: how long to wait for the running requests; without it, until the last one ends.

    Raises:
        ScheduleError: the file cannot be read or holds no schedule.
        EndpointError: the server refused, for the reason that the message gives, or is gone.

    Warns:
        UserWarning: the schedule was calibrated for another model.
    """
    if isinstance(schedule, str) and (schedule.endswith(".json") or os.sep in schedule):
        schedule = BudgetSchedule.from_json(schedule)
    value = schedule if isinstance(schedule, str) else schedule.model_dump(mode="json")
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    answer = connect(target, api_key).call_sparrow("schedule", schedule=value, **limit)
    if answer["warning"]:
        warnings.warn(answer["warning"], stacklevel=2)
    return BudgetSchedule(**answer["previous"])
