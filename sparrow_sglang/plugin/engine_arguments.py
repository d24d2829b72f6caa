"""Arguments of `sglang.Engine` as users give them to our commands, checked before one starts.

In: JSON, or names. Out: arguments, or an error that names the wrong one. SGLang is not imported,
as that takes some ten seconds.
"""

import ast
import difflib
import functools
import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparrow_sglang.plugin.server_args import FIELDS


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
            near = " or ".join(map(repr, difflib.get_close_matches(name, sorted(known), n=3)))
            hint = f"did you mean {near}?" if near else "expected a field of its ServerArgs"
            return f"{name} is no argument of SGLang: {hint}"
    return None


@functools.cache
def argument_names() -> frozenset[str]:
    """Fields of SGLang's `ServerArgs`, read from its source, and those that we add to it."""
    package = find_spec("sglang")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("SGLang is not installed: pip install sglang==0.5.17")
    source = Path(package.origin).with_name("srt") / "server_args.py"
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            names = (field.id for field in fields if isinstance(field, ast.Name))
            return frozenset([*names, *FIELDS])
    raise RuntimeError(f"{source} has no class ServerArgs: need sglang 0.5.17")
