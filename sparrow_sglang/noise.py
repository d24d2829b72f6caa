"""Quiet starts and ends of our commands: three messages, and Ctrl-C in child processes.

A command calls `leave_out` once, in its own process; every process that it starts and that imports
SGLang does the same.
"""

import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable

VARIABLE = "SPARROW_LEAVE_OUT_NOISE"
"""Set for the processes that a command starts."""

# By the name of the logger: the beginning of the message, a regular expression.
_LOGGED = {
    # All of some 400 arguments; /server_info shows them.
    "sglang.srt.entrypoints.engine": r"server_args=ServerArgs\(",
    # Ctrl-C, by which a server is ended.
    "uvicorn.error": r"(?s)Traceback .*(KeyboardInterrupt|CancelledError)",
}


def _others_than(beginning: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not re.match(beginning, record.getMessage())


# Made once, so that a logger does not get a second one.
_FILTERS = {source: _others_than(beginning) for source, beginning in _LOGGED.items()}


def leave_out() -> None:
    """Suppress these messages in this process and in those that it starts from now on."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = "1"
        # SGLang ends its processes by SIGKILL, and Python's tracker then warns of their semaphores,
        # which it removes. The tracker does not import this package, but reads this variable.
        given = os.environ.get("PYTHONWARNINGS")
        tracker = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = f"{given},{tracker}" if given else tracker
    for source, left_out in _FILTERS.items():
        logging.getLogger(source).addFilter(left_out)


def leave_out_if_asked() -> None:
    """`leave_out` in a process that a command of ours has started.

    Ctrl-C on a terminal reaches the command and all processes that it has started. These ignore it,
    and the command ends them; otherwise each would end with a traceback.
    """
    if VARIABLE not in os.environ:
        return
    leave_out()
    # SGLang is imported while the process unpickles what it shall run. `parent_process` knows of a
    # parent only after that.
    started = multiprocessing.current_process().name != "MainProcess"
    if started and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
