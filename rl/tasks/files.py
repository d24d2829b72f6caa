"""Prompts of your data files, rewarded by your function, which receives the row as `payload`."""

import importlib.util
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
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
    """Raises `InputError` without importing the module."""
    module = name.partition(":")[0]
    first, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
        for number, _ in enumerate(parts, 2):
            if spec is None or spec.submodule_search_locations is None:
                spec = None
                break
            path = ".".join([first, *parts][:number])
            spec = PathFinder.find_spec(path, list(spec.submodule_search_locations))
    except ValueError:
        spec = None
    if spec is None:
        raise InputError(f"{key}={name!r}: there is no module {module!r}; {_EXPECTED}")


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
