"""Functions of the user's, by name."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from sparrow_sglang.errors import InputError

_EXPECTED = (
    "expected module:function, of a module that Python can import: add its folder to PYTHONPATH"
)


def require_module(key: str, name: str) -> None:
    """Raise `InputError` unless the package of a setting module:function can be found."""
    package = re.split("[.:]", name)[0]
    if find_spec(package) is None:
        raise InputError(f"{key}={name!r}: no module named {package!r}; {_EXPECTED}")


def imported(key: str, name: str) -> Callable[..., Any]:
    """The function that the setting `key` names, as module:function.

    Raises `InputError` if there is none.
    """
    try:
        found = resolve_name(name)
        if not callable(found):
            raise ValueError("it is no function")
    except (ImportError, ValueError, AttributeError) as error:
        raise InputError(f"{key}={name!r}: {error}; {_EXPECTED}") from None
    function: Callable[..., Any] = found
    return function
