"""Recorded response lengths, as the --lengths-file of several commands holds them.

In: a JSON list, or JSONL, of 1234 or {"length": 1234}. Out: lengths in tokens, in the file's order.
"""

import json
from pathlib import Path
from typing import Any

_EXPECTED = (
    "expected for --lengths-file a text file with a JSON list, or with one length per line: a whole"
    ' number of 1 or more tokens, or {"length": 1234}'
)


def read_lengths(path: Path) -> list[int]:
    """Lengths in tokens, one or more, all of them 1 or more.

    Raises `ValueError` if the file cannot be read, or with the place of what is no length.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            items = [(f"item {i}", item) for i, item in enumerate(json.loads(text), 1)]
        else:
            lines = [(f"line {i}", line) for i, line in enumerate(text.splitlines(), 1)]
            items = [(place, _parsed(line)) for place, line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); {_EXPECTED}") from None
    if not items:
        raise ValueError(f"{path}: holds no lengths; {_EXPECTED}")
    return [_length(item, f"{path}, {place}") for place, item in items]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return line.strip()


def _length(item: Any, place: str) -> int:
    length = item.get("length") if isinstance(item, dict) else item
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"{place}: {json.dumps(item)[:60]} is no length; {_EXPECTED}")
    return length
