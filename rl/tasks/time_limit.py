"""A limit of time for code that swallows alarms."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

# An alarm raised in a destructor or in a callback of the garbage collector is lost, so it comes
# again.
REPEAT_S = 1.0


class _OutOfTime(BaseException):
    """Not an `Exception`, which sympy catches."""


def holds_within(seconds: float, judge: Callable[[], bool]) -> bool:
    """What `judge` returns, or False after `seconds`. Without a limit outside the main thread, as
    no other receives signals. A timer that was set before, such as pytest's, goes on."""
    if threading.current_thread() is not threading.main_thread():
        return judge()
    began, others = time.monotonic(), 0.0
    handler = signal.signal(signal.SIGALRM, _raise)
    try:
        try:
            others, _ = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
            return judge()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OutOfTime:
        return False
    finally:
        signal.signal(signal.SIGALRM, handler)
        if others:
            left = others - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))


def _raise(*_: Any) -> None:
    raise _OutOfTime
