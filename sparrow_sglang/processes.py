"""Signals of this process, and the environment of those that it starts."""

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any, NoReturn

_SHIELDED = "SPARROW_IGNORE_SIGINT"


def shield_children() -> None:
    """Have processes that this one starts, and that import SGLang, ignore SIGINT. On a terminal
    Ctrl-C reaches them all; a command ends them itself, or needs them for what it finishes."""
    os.environ[_SHIELDED] = "1"


def ignore_sigint_if_shielded() -> None:
    # SGLang is imported while a process unpickles its target; `parent_process` is set after that.
    started = multiprocessing.current_process().name != "MainProcess"
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _SHIELDED in os.environ and started and in_main_thread:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def exit_on_sigterm() -> None:
    """Have SIGTERM, which `timeout` sends, raise SystemExit, so that child processes are ended.
    SGLang's processes end with their parent only once they have imported SGLang."""

    def end(number: int, frame: Any) -> NoReturn:
        if not threading.main_thread().is_alive():
            # Python only joins threads; it would print the exception and continue.
            os._exit(128 + number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
