"""Progress of a command: a bar on a terminal, elsewhere a line per minute with the time."""

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

LOG_EVERY_S = 60.0
"""Least seconds between two lines where stderr is no terminal."""


class Progress:
    """The stage under way, on stderr, and results above it, on stdout. A bar of tqdm over `total`
    units where stderr is a terminal. Elsewhere a line with the time of day, `prefix` and the stage,
    at most one in `LOG_EVERY_S`, or nothing if `quiet`."""

    def __init__(self, total: int, unit: str, initial: int = 0, quiet: bool = False) -> None:
        # tqdm's own lock also works across processes: with "spawn", which SGLang sets, it is a
        # semaphore that a helper process tracks. SGLang's engine kills that process with its own
        # when it shuts down, and Python then ends with a traceback.
        tqdm.set_lock(threading.RLock())
        self._plain = not sys.stderr.isatty()
        self._bar: tqdm[Any] = tqdm(
            total=total, unit=unit, initial=initial, disable=self._plain, dynamic_ncols=True
        )
        self._logged_at = math.inf if quiet else -math.inf
        self.prefix = ""

    def show(self, stage: str) -> None:
        self._bar.set_postfix_str(stage)
        now = time.monotonic()
        if self._plain and now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            print(f"{time.strftime('%H:%M:%S')} {self.prefix}{stage}", file=sys.stderr, flush=True)

    def counter(self, stage: str, total: int, unit: str) -> Callable[..., None]:
        """A function that counts up by 1, or by its argument, and shows the count."""
        done = 0

        def finished(count: int = 1) -> None:
            nonlocal done
            done += count
            self.show(f"{stage} {done}/{total} {unit}")

        finished(0)
        return finished

    def advance(self, units: int = 1) -> None:
        self._bar.update(units)

    def print_line(self, line: str) -> None:
        if self._plain:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        self._bar.close()
