"""Command lines that are refused in one line, with the option, its value and what is allowed."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from sparrow_sglang.json_values import shortened


def at_least(least: int) -> Callable[[str], int]:
    """An argparse `type` of whole numbers from `least` on."""

    def parse(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {word}")
        return number

    return parse


count = at_least(1)
"""An argparse `type` of whole numbers from 1 on."""


class OneLineParser(argparse.ArgumentParser):
    """`error` ends the process with exit code 2 and one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shortened(message)}; see {self.prog} --help\n")
