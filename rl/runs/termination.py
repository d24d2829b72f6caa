"""SIGTERM and Ctrl-C as one exception that never interrupts an optimizer step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(SystemExit):
    """The process was asked to end; its exit code is 128 + the signal's number."""


class Termination:
    """Raises `Stopped` in the main thread on SIGTERM and SIGINT while it is open.

    `Stopped` is a subclass of SystemExit, because asyncio keeps other exceptions in the task in
    which they are raised.
    """

    def __init__(self, held: bool = False) -> None:
        """With `held`, signals are held back except where `let_in` is open."""
        self._held = held
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
        with self._holding(True):
            yield
        self._raise_if_asked()

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """Raise `Stopped` at once in the block, for signals that came before or come during it."""
        with self._holding(False):
            self._raise_if_asked()
            yield

    @contextmanager
    def kept_from_children(self) -> Iterator[None]:
        """Processes that the block starts never get the signals; this one gets them afterwards.

        Job schedulers send signals to all processes of a run at once. An engine that dies of one
        would keep its rank from the point where all ranks save together.
        """
        # Started beforehand, because its start unblocks the signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def _holding(self, held: bool) -> Iterator[None]:
        before, self._held = self._held, held
        try:
            yield
        finally:
            self._held = before

    def _raise_if_asked(self) -> None:
        if self._asked is not None and not self._held:
            raise Stopped(128 + self._asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        if not self._held:
            raise Stopped(128 + number)
