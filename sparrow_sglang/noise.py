"""Messages that libraries write at every start and our commands suppress as known to be harmless.

A command calls `leave_out` once, in its own process; every process that it starts and that imports
SGLang does the same. Messages that are not listed here still appear.
"""

import logging
import multiprocessing
import os
import re
import signal
import threading
import warnings
from typing import NamedTuple

VARIABLE = "SPARROW_LEAVE_OUT_NOISE"
"""Set for the processes that a command starts."""


class _Harmless(NamedTuple):
    """A message by its source and its beginning, a regular expression, and why nobody needs it."""

    source: str
    beginning: str
    why: str


# By the module that warns.
_WARNINGS = (
    _Harmless(
        r"sglang\.kernels\.ops\.attention\.fla\.utils",
        "Triton is not supported on current platform",
        "plain torch decodes without a GPU, as `sparrow doctor` says",
    ),
    _Harmless(
        r"sglang\.srt\.layers\.quantization\.",
        "Only CUDA, .* support (AWQ|GGUF)",
        "said whether or not the model is quantised; a model that is fails with an error",
    ),
    _Harmless(
        r"multiprocessing\.resource_tracker",
        "resource_tracker: There appear to be [0-9]+ leaked semaphore objects",
        "SGLang ends its processes by SIGKILL; what they leave is cleaned up when this is said",
    ),
)
# By the name of the logger.
_LOGGED = (
    _Harmless(
        "torch.utils.cpp_extension",
        "No CUDA runtime is found",
        "there is nvcc and no GPU; nothing is compiled for one",
    ),
    _Harmless(
        "sglang.srt.utils.common",
        "Fail to set RLIMIT_",
        "the limit that there is does for thousands of clients",
    ),
    _Harmless(
        "sglang.srt.models.registry",
        r"Ignore import error when loading .*No module named 'vllm'",
        "of models that only vLLM's kernels can run",
    ),
    _Harmless(
        "sglang.srt.entrypoints.engine",
        r"server_args=ServerArgs\(",
        "all of some 400 arguments; /server_info shows them",
    ),
    _Harmless(
        "sglang.srt.entrypoints.engine",
        "Using custom SIGQUIT handler",
        "it is ours",
    ),
    _Harmless(
        "sglang.srt.distributed.bootstrap",
        "Init torch distributed (begin|ends)",
        "milliseconds, of one process",
    ),
    _Harmless(
        "uvicorn.error",
        r"(?s)Traceback .*KeyboardInterrupt.*CancelledError",
        "Ctrl-C, by which a server is ended",
    ),
    _Harmless(
        "transformers.tokenization_utils_base",
        "Token indices sequence length is longer than the specified maximum",
        "of a corpus that is cut into prompts, none longer than the context, which is checked",
    ),
)


class _LeaveOut(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = re.compile(beginning)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._beginning.match(record.getMessage())


_FILTERS = tuple((source, _LeaveOut(beginning)) for source, beginning, _ in _LOGGED)


def leave_out() -> None:
    """Suppress these messages in this process and in those that it starts from now on."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = "1"
        # The process that tracks semaphores does not import this package, but reads this variable.
        given = os.environ.get("PYTHONWARNINGS")
        tracker = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = f"{given},{tracker}" if given else tracker
    for source, beginning, _ in _WARNINGS:
        warnings.filterwarnings("ignore", beginning, UserWarning, source)
    for source, left_out in _FILTERS:
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
