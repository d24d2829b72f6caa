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


def read_text(path: str | os.PathLike[str], setting: str = "") -> str:
    """The text of a file, which `setting` names; raises `InputError`."""
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        named = f"{setting}{cut(str(path))}{relative_note(path)}"
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{named}: cannot be read ({reason})") from None


def read_object(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """The JSON object in a file; raises `InputError`, which says what is `expected`."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f": not JSON ({error})"
    else:
        if isinstance(value, dict):
            return value
        problem = f": holds a {type(value).__name__}"
    raise InputError(f"{cut(str(path))}{problem}; expected {expected}")
