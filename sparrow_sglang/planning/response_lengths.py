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
        try:
            items = [(f", item {i}", item) for i, item in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as error:
            raise _problem(path, f"begins as a JSON list, but is none ({error})") from None
    else:
        lines = [(f":{i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        items = [(place, _parsed(line)) for place, line in lines]
    if not items:
        raise _problem(path, "holds no lengths")
    return [_length(item, f"{path}{place}") for place, item in items]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return line.strip()


def _length(item: Any, place: str) -> int:
    length = item.get("length") if isinstance(item, dict) else item
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"{place}: {json.dumps(item)[:60]} is no length; expected {_EXPECTED}")
    return length


def _problem(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path}: {what}; expected for --lengths-file a text file with a JSON list, or with one"
        f" length per line: {_EXPECTED}"
    )
