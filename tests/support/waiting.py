"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], limit_s: float = 60.0) -> Found:
    """What `condition` returns, once that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still {found!r} after {limit_s:.0f} s"
        time.sleep(0.05)
    return found
