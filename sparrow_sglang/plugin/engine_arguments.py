"""Arguments of `sglang.Engine` as users give them to our commands, checked before one starts.

In: JSON, or names. Out: arguments, or an error that names the wrong one. SGLang is not imported,
as that takes some ten seconds.
"""

import json
from collections.abc import Iterable
from typing import Any

from sparrow_sglang.plugin.server_args import FIELDS
from sparrow_sglang.sglang_versions import server_argument_names
from sparrow_sglang.validation import nearest_first


def engine_arguments(text: str) -> dict[str, Any]:
    """The value of --engine-args. Raises `ValueError` if it is no JSON object of known names."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"--engine-args {text}: expected a JSON object of arguments of sglang.Engine, in"
            " quotes, e.g. '{\"tp_size\": 2}'"
        )
    if problem := unknown_argument(arguments):
        raise ValueError(f"--engine-args: {problem}")
    return arguments


def unknown_argument(names: Iterable[str]) -> str | None:
    """What to say of the first name that `sglang.Engine` does not know, None if it knows all."""
    known = argument_names()
    for name in names:
        if name not in known:
            near = " or ".join(map(repr, nearest_first(name, sorted(known), cutoff=0.6)[:3]))
            hint = f"did you mean {near}?" if near else "expected a field of its ServerArgs"
            return f"{name} is no argument of SGLang: {hint}"
    return None


def argument_names() -> frozenset[str]:
    """What `sglang.Engine` takes by name: fields of SGLang's `ServerArgs`, and ours."""
    return server_argument_names() | FIELDS.keys()
