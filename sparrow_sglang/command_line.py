"""A parser whose refusal of a command line is one line that names where to read on."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """`error` ends the process with exit code 2 and one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")
