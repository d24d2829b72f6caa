"""SIGTERM and Ctrl-C as one exception that never interrupts an optimizer step."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 1.0
"""A SIGINT so soon after another is not a second one: commands that run a process forward theirs,
which a terminal has sent to the process as well."""


class Stopped(SystemExit):
    """The process was asked to end; its exit code is 128 + the signal's number."""


class Termination:
    """How `Stopped` is raised in the main thread on SIGTERM and SIGINT.

    A second SIGINT does not wait for a block that holds `Stopped` back. `at_once` is then set:
    weights may be in the middle of a change, and nothing is to be saved any more. Other further
    signals change nothing, as schedulers send several to end a process.
    `Stopped` is a subclass of SystemExit, because asyncio keeps other exceptions in the task in
    which they are raised.
    """

    def __init__(self) -> None:
        self.at_once = False
        self._held = ""
        self._asked: int | None = None
        self._asked_at = 0.0

    @contextmanager
    def held_back(self, doing: str) -> Iterator[None]:
        """Delay `Stopped` until the block, which does `doing`, has ended."""
        before, self._held = self._held, self._held or doing
        try:
            yield
        finally:
            self._held = before
        if self._asked is not None and not self._held:
            raise Stopped(128 + self._asked)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        now = time.monotonic()
        again = number == self._asked == signal.SIGINT and now - self._asked_at >= AGAIN_S
        first, self._asked = self._asked is None, number
        if first:
            self._asked_at = now
        if again:
            self.at_once = True
        elif not first:
            return
        elif self._held:
            # Written directly, as the signal may have come in the middle of a print.
            line = f"\nstopping after the {self._held}; Ctrl-C again stops at once, without it\n"
            os.write(2, line.encode())
            return
        raise Stopped(128 + number)


@contextmanager
def termination_signals() -> Iterator[Termination]:
    """Handle SIGTERM and SIGINT by a `Termination` within the block."""
    termination = Termination()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, termination.handle) for number in signals}
    try:
        yield termination
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
