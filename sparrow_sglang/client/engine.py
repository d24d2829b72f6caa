"""Engines in this process, which keep its signals."""

import gc
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import zmq

from sparrow_sglang.plugin.server_log import keep_warnings

_UNFINISHED: list[zmq.Context[Any]] = []
"""Of engines that did not start."""


def start_engine(
    arguments: dict[str, Any],
    on_death: Callable[[Any], object],
    died: type[RuntimeError] = RuntimeError,
) -> Any:
    """An `sglang.Engine`, with signals as `keep_signals` says. Raises what SGLang raises on wrong
    arguments, and `died` if a process of the engine ends while it starts."""
    import sglang

    keep_warnings()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    # The engine's processes receive all arguments, pickled.
    quiet = {"log_level": "error", "custom_sigquit_handler": partial(_fail, died)}
    try:
        engine = sglang.Engine(**quiet | arguments)
    except BaseException:
        # Collected before a socket of its own, a context would wait for it, and never end.
        _UNFINISHED.extend(each for each in gc.get_objects() if isinstance(each, zmq.Context))
        raise
    keep_signals(engine, on_sigterm, on_death)
    return engine


def _fail(died: type[RuntimeError], *_: Any) -> NoReturn:
    raise died("a process of the engine failed; its traceback is on stderr")


def keep_signals(engine: Any, on_sigterm: Any, on_death: Callable[[Any], object]) -> None:
    """Give SIGTERM its handler back, and call `on_death` with the engine when a process of it dies.
    SGLang's own handlers, which it sets with the first call, kill this process without a message,
    wait for all requests, and miss a signal while no call waits. Only the main thread has any."""
    handlers = {signal.SIGTERM: on_sigterm, signal.SIGQUIT: lambda *_: on_death(engine)}

    async def replace() -> None:
        engine.tokenizer_manager.auto_create_handle_loop()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                engine.loop.remove_signal_handler(number)
                signal.signal(number, handler)

    engine.loop.run_until_complete(replace())
