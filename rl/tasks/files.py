"""Prompts of your data files, rewarded by your function, which receives the row as `payload`."""

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.base import FileOptions, Render, Task, load_files, parse_options


class OwnRewardOptions(FileOptions):
    reward: str
    """module:function."""


def load(config: TaskSource, render: Render) -> Task:
    options = parse_options(OwnRewardOptions, config)
    reward = imported("task.options.reward", options.reward)
    return load_files(config, render, _payload, options, reward)


def _payload(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if name != "prompt"}


_EXPECTED = (
    "expected module:function, of a module that Python can import: add its folder to PYTHONPATH"
)


def require_module(key: str, name: str) -> None:
    """Raises `InputError` if its package is not there; imports nothing."""
    package = name.partition(":")[0].partition(".")[0]
    if package not in sys.modules and not (package and find_spec(package)):
        raise InputError(f"{key}={name!r}: there is no module {package!r}; {_EXPECTED}")


def imported(key: str, name: str) -> Callable[..., Any]:
    """Raises `InputError`."""
    try:
        value = resolve_name(name)
        if not callable(value):
            raise ValueError("it is no function")
    except (ImportError, ValueError, AttributeError) as error:
        raise InputError(f"{key}={name!r}: {error}; {_EXPECTED}") from None
    function: Callable[..., Any] = value
    return function
