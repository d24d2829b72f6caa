"""The processes that an `sglang.Engine` starts, and the signals of the process that started it."""

import signal
import threading
from asyncio import AbstractEventLoop
from collections.abc import Iterable
from typing import Any

import psutil

from sparrow_sglang.errors import SparrowError


class EngineDied(SparrowError, RuntimeError):
    """A process of an engine is gone, or an engine does not answer."""


class EngineNotStarted(EngineDied):
    """An engine did not start, and would not do so another time."""


class EngineProcesses:
    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def are_running(self) -> bool:
        return all(process.is_running() for process in self._processes)

    def require_alive(self) -> None:
        """Raise `EngineDied` if a process is gone."""
        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise EngineDied(f"process {process.pid} of the SGLang engine died; see stderr")

    def kill(self) -> None:
        """End the processes and their children, and no others."""
        family = [child for process in self._processes for child in _family(process)]
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=10)


def take_signals_back(loop: AbstractEventLoop, on_sigterm: Any) -> None:
    """Put `on_sigterm` in the place of SGLang's handlers, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGQUIT):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, on_sigterm)
        # A failing engine process sends it to its parent; `require_alive` will find it dead.
        signal.signal(signal.SIGQUIT, lambda *_: None)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []
