"""The error of a server that cannot start as configured."""

from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.names import BACKEND


def refuse(problems: list[str]) -> None:
    """Raise `InputError` that lists the problems, if there are any."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"attention backend {BACKEND!r} cannot run here:\n{listed}")
