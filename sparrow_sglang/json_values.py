"""JSON that comes from outside: reading it, and how errors quote it."""

import json
import os
import re
from pathlib import Path
from typing import Any

from sparrow_sglang.errors import InputError

_MAX_QUOTE = 200


def quoted(value: object, limit: int = _MAX_QUOTE) -> str:
    """`value` as an error message shows it: its repr, at most `limit` characters of it."""
    try:
        text = repr(value[: limit + 1] if isinstance(value, str) else value)
    except (RecursionError, ValueError):
        # Nested too deeply, or a whole number of more digits than Python prints.
        text = f"<{type(value).__name__}>"
    return cut(text, limit)


def cut(text: str, limit: int = _MAX_QUOTE) -> str:
    """At most `limit` characters of `text`, on one line: what cannot be printed is escaped."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def shortened(message: str) -> str:
    """`message` with its words cut to 300 characters, such as values from outside."""
    return re.sub(r"\S{300,}", lambda word: cut(word[0], 300), message)


def relative_note(path: str | os.PathLike[str]) -> str:
    """What a relative path is relative to, for an error message; nothing for an absolute one."""
    return "" if os.path.isabs(path) else f" (relative to {os.getcwd()})"


def read_object(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """The JSON object in a file; raises `InputError`, which says what is `expected`."""
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        problem = f"{relative_note(path)}: cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        problem = f": not JSON ({error})"
    else:
        if isinstance(value, dict):
            return value
        problem = f": holds a {type(value).__name__}"
    raise InputError(f"{cut(str(path))}{problem}; expected {expected}")
