"""Environment variables that are set for a while, for processes started meanwhile to inherit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exported(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
