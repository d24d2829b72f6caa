"""SIGTERM and Ctrl-C as one exception that never interrupts an optimizer step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(SystemExit):
    """The process was asked to end; its exit code is 128 + the signal's number."""


class Termination:
    """Raises `Stopped` in the main thread on SIGTERM and SIGINT while it is open.

    `Stopped` is a subclass of SystemExit, because asyncio keeps other exceptions in the task in
    which they are raised.
    """

    def __init__(self) -> None:
        self._held = False
        self._asked: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Delay `Stopped` until the block has ended."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
        if self._asked is not None and not self._held:
            raise Stopped(128 + self._asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        if not self._held:
            raise Stopped(128 + number)
