"""Functions of the user's, by name."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from sparrow_sglang.errors import InputError


def imported(key: str, name: str) -> Callable[..., Any]:
    """The function that the setting `key` names, as module:function.

    Raises `InputError` if there is none.
    """
    try:
        found = resolve_name(name)
        if not callable(found):
            raise ValueError("it is no function")
    except (ImportError, ValueError, AttributeError) as error:
        raise InputError(
            f"{key}={name!r}: {error}; expected module:function, of a module that Python can"
            " import: add its folder to PYTHONPATH"
        ) from None
    function: Callable[..., Any] = found
    return function
