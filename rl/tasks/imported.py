"""Functions of the user's, by name."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from sparrow_sglang.errors import InputError


def imported(key: str, name: str) -> Callable[..., Any]:
    """The function that the setting `key` names, as module:function.

    Raises `InputError` if there is none.
    """
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{key}={name!r}: {error}; expected module:function, of a module that Python can"
            " import: add its folder to PYTHONPATH"
        ) from None
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        functions = [
            key
            for key, value in inspect.getmembers(module, inspect.isfunction)
            if value.__module__ == module_name
        ]
        raise InputError(
            f"{key}={name!r}: {module_name} has no function {function!r}; it has"
            f" {', '.join(functions) or 'none'}"
        )
    return found
