"""`--set section.key=value`: settings on the command line that override those of a file.

In: nested values of a TOML file, and KEY=VALUE strings. Out: the overridden values, unchecked.
"""

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import date, time
from typing import Any

from sparrow_sglang.errors import InputError


def with_overrides(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`values` overridden by each KEY=VALUE of `settings`; of several for one key the last holds.

    A value is read as TOML, and taken as it is if it is none. Raises `InputError` on a setting that
    is not KEY=VALUE.
    """
    result = deepcopy(dict(values))
    for setting in settings:
        key, equals, text = setting.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or not all((*sections, name)):
            raise InputError(
                f"--set {setting!r}: expected KEY=VALUE, the key with its section, such as"
                " optimizer.lr=3e-6"
            )
        table = result
        for section in sections:
            if not isinstance(table.get(section), dict):
                table[section] = {}
            table = table[section]
        table[name] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    # No setting is a date; a folder may be named by one.
    return text if isinstance(value, date | time) else value
