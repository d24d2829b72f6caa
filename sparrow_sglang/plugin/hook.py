"""How a function of ours changes one of SGLang's."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Hook(NamedTuple):
    """One hook into SGLang, a row of a table of hooks.

    Attributes:
        kind: name of a HookType.
        parameters: names of the target's first parameters that `function` reads, without self;
            "a|b" where versions of SGLang differ, "*a" for one that may be at any position.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    parameters: str = ""
