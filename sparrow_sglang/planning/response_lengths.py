"""Recorded response lengths, as the --lengths-file of several commands holds them.

In: a JSON list, or JSONL, of 1234 or {"length": 1234}. Out: lengths in tokens, in the file's order.
"""

import json
from pathlib import Path
from typing import Any

_EXPECTED = 'a whole number of 1 or more tokens, or {"length": 1234}'


def read_lengths(path: Path) -> list[int]:
    """Lengths in tokens, one or more, all of them 1 or more.

    Raises `ValueError` if the file cannot be read, or with the place of what is no length.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _problem(path, f"cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise _problem(path, "not UTF-8 text") from None
    if text.lstrip().startswith("["):
        lengths = [
            _length(value, json.dumps(value), f"{path}, item {number}")
            for number, value in enumerate(_items(path, text), 1)
        ]
    else:
        lengths = [
            _length(_parsed(line), repr(line.strip()), f"{path}:{number}")
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
    if not lengths:
        raise _problem(path, "holds no lengths")
    return lengths


def _items(path: Path, text: str) -> list[Any]:
    try:
        items: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise _problem(path, f"begins as a JSON list, but is none ({error})") from None
    return items


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _length(value: Any, shown: str, place: str) -> int:
    length = value.get("length") if isinstance(value, dict) else value
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"{place}: {shown[:60]} is no length; expected {_EXPECTED}")
    return length


def _problem(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path}: {what}; expected for --lengths-file a text file with a JSON list, or with one"
        f" length per line: {_EXPECTED}"
    )
