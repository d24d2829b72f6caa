"""Suppresses known warnings in our commands and in the processes that they start."""

import logging
import multiprocessing
import os
import re
import signal
import threading
import warnings

_VARIABLE = "SPARROW_LEAVE_OUT_NOISE"
"""Set for the processes that a command starts."""

# The first is Python's, on semaphores of processes that SGLang kills.
_WARNINGS = ("resource_tracker", "Only CUDA", "Triton is not supported")
# Beginnings of messages, regular expressions, by logger.
_LOGGED = {
    "sglang.srt.utils.common": "Fail to set RLIMIT",
    "sglang.srt.models.registry": "Ignore import error",
    "sglang.kernels.jit.utils.arch": "Cannot detect CUDA architecture",
    # Ctrl-C, by which a server is ended.
    "uvicorn.error": r"(?s)Traceback .*(KeyboardInterrupt|CancelledError)",
}


def suppress() -> None:
    """Here, and in processes started from now on."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = "1"
        inherited = filter(None, [os.environ.get("PYTHONWARNINGS")])
        ours = (f"ignore:{beginning}:UserWarning" for beginning in _WARNINGS)
        os.environ["PYTHONWARNINGS"] = ",".join((*inherited, *ours))
    for beginning in _WARNINGS:
        warnings.filterwarnings("ignore", beginning, UserWarning)
    for source in _LOGGED:
        logging.getLogger(source).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not re.match(_LOGGED[record.name], record.getMessage())


def suppress_if_inherited() -> None:
    """`suppress` in a process that a command of ours has started. Ctrl-C on a terminal reaches the
    command and all processes that it has started. These ignore it, and the command ends them;
    otherwise each would end with a traceback."""
    if _VARIABLE not in os.environ:
        return
    suppress()
    # SGLang is imported while the process unpickles its target; `parent_process` is set after that.
    started = multiprocessing.current_process().name != "MainProcess"
    if started and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
