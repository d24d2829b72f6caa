"""`--set section.key=value`: settings on the command line that override those of a file.

In: nested values of a TOML file, and KEY=VALUE strings. Out: the overridden values, unchecked.
"""

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any

from sparrow_sglang.errors import InputError


def with_overrides(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`values` overridden by each KEY=VALUE of `settings`; of several for one key the last holds.

    A value is read as TOML, and taken as it is if it is none. Raises `InputError` on a setting that
    is not KEY=VALUE.
    """
    result = dict(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise InputError(
                f"--set {setting!r}: expected KEY=VALUE, the key with its section, such as"
                " optimizer.lr=3e-6"
            )
        _put(result, path, _value(text.strip()))
    return result


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    first, *rest = path
    if not rest:
        values[first] = value
        return
    below = values.get(first)
    # Copied, so that the caller's values do not change.
    values[first] = dict(below) if isinstance(below, Mapping) else {}
    _put(values[first], rest, value)


def _value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    # No setting is a date; a folder may be named by one.
    return text if isinstance(value, date | time) else value
