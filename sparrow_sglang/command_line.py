"""Command lines that are rejected in one line, with the option, its value and what is allowed; and
tables."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sparrow_sglang.json_values import shortened


def at_least(least: int, most: int = 2**30) -> Callable[[str], int]:
    """An argparse `type` of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text}")
        return number

    return parse


count = at_least(1)


def rate(text: str) -> float:
    """An argparse `type` of chances, from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected 0 to 1, got {text}")
    return number


def new_path(text: str) -> Path:
    """An argparse `type` of files and folders to write, which may exist; their folder must."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a name in an existing folder, got {text}")
    return path


def table(rows: Sequence[Sequence[str]], align: str = "<") -> str:
    """`rows` in columns, aligned left, or right by ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = "  ".join(f"{{:{align}{width}}}" for width in widths)
    return "\n".join(columns.format(*row).rstrip() for row in rows)


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
