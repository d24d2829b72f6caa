"""Command lines that are refused in one line, with the option, its value and what is allowed;
tables; and commands that leave no process behind."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from sparrow_sglang.json_values import shortened


def at_least(least: int, most: int = 2**30) -> Callable[[str], int]:
    """An argparse `type` of whole numbers from `least` to `most`."""

    def parse(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {word}")
        return number

    return parse


count = at_least(1)


def table(rows: Sequence[Sequence[str]], align: str = "<") -> str:
    """`rows` in columns, aligned left, or right by ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = "  ".join(f"{{:{align}{width}}}" for width in widths)
    return "\n".join(columns.format(*row).rstrip() for row in rows)


def exit_on_sigterm() -> None:
    """Have SIGTERM, which `timeout` sends, raise SystemExit, so that child processes are ended.
    SGLang's processes end with their parent only once they have imported SGLang."""

    def end(number: int, frame: Any) -> NoReturn:
        if not threading.main_thread().is_alive():
            # Python only joins threads; it would print the exception and go on.
            os._exit(128 + number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


async def replace_signal_handlers(engine: Any, handlers: Mapping[signal.Signals, Any]) -> None:
    """Put these in the place of those that an `sglang.Engine` sets with its first call. Only the
    main thread can, and only there SGLang has set any."""
    engine.tokenizer_manager.auto_create_handle_loop()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            engine.loop.remove_signal_handler(number)
            signal.signal(number, handler)


class OneLineParser(argparse.ArgumentParser):
    """`error` ends the process with exit code 2 and one line instead of the whole usage, which
    names the subcommand."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shortened(message)}; see {self.prog} --help\n")
