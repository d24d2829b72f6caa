"""How far a command is: a bar on a terminal, dated lines in a log file."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

COUNT_EVERY_S = 5.0
"""Least seconds between two lines of a counter in a file."""


class Progress:
    """What is under way, on stderr, and results above it, on stdout.

    A bar of tqdm over `total` units where stderr is a terminal. Elsewhere, each `show` is a line
    with the time of day, `where` before it, or nothing if `quiet`.
    """

    def __init__(self, total: int, unit: str, initial: int = 0, quiet: bool = False) -> None:
        # tqdm's own lock also works across processes: with "spawn", which SGLang sets, it is a
        # semaphore that a helper process tracks. SGLang's engine kills that process with its own
        # when it shuts down, and Python then ends with a traceback.
        tqdm.set_lock(threading.RLock())
        self._plain = not sys.stderr.isatty()
        self._quiet = quiet
        self._bar: tqdm[Any] = tqdm(
            total=total, unit=unit, initial=initial, disable=self._plain, dynamic_ncols=True
        )
        self.where = ""

    def show(self, doing: str) -> None:
        """Say what is under way from now on."""
        self._bar.set_postfix_str(doing)
        if self._plain and not self._quiet:
            print(f"{time.strftime('%H:%M:%S')} {self.where}{doing}", file=sys.stderr, flush=True)

    def counter(self, doing: str, total: int, things: str) -> Callable[..., None]:
        """A function that counts on by 1, or by its argument, and shows how many of `total` things
        are done; in a file at most every few seconds, and at the end."""
        done, shown_at = 0, time.monotonic()

        def finished(count: int = 1) -> None:
            nonlocal done, shown_at
            done, now = done + count, time.monotonic()
            if self._plain and done < total and now - shown_at < COUNT_EVERY_S:
                return
            shown_at = now
            self.show(f"{doing} {done}/{total} {things}")

        self.show(f"{doing} 0/{total} {things}")
        return finished

    def advance(self, units: int = 1) -> None:
        """Move the bar on."""
        self._bar.update(units)

    def say(self, line: str) -> None:
        """Print a line of results."""
        if self._plain:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        """Leave the terminal as it is."""
        self._bar.close()
