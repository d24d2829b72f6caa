"""Signals of this process, and the environment of those that it starts."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn


@contextmanager
def exported(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, for processes started within the block to inherit."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def exit_on_sigterm() -> None:
    """Have SIGTERM, which `timeout` sends, raise SystemExit, so that child processes are ended.
    SGLang's processes end with their parent only once they have imported SGLang."""

    def end(number: int, frame: Any) -> NoReturn:
        if not threading.main_thread().is_alive():
            # Python only joins threads; it would print the exception and continue.
            os._exit(128 + number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


async def replace_signal_handlers(engine: Any, handlers: Mapping[signal.Signals, Any]) -> None:
    """Replace those that an `sglang.Engine` sets with its first call. Only the main thread can, and
    only there SGLang has set any."""
    engine.tokenizer_manager.auto_create_handle_loop()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            engine.loop.remove_signal_handler(number)
            signal.signal(number, handler)
