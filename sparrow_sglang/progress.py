"""Progress bars on the terminal."""

import threading
from typing import Any

from tqdm import tqdm


def progress_bar(**settings: Any) -> "tqdm[Any]":
    """A bar of tqdm with these settings."""
    # tqdm's own lock is for other processes, too: with "spawn", which SGLang sets, a semaphore that
    # a helper process keeps track of. SGLang's engine kills that process with its own when it shuts
    # down, and Python then ends with a traceback.
    tqdm.set_lock(threading.RLock())
    return tqdm(**settings)
