"""What depends on SGLang's version: which versions are supported, and what differs between them.

To support another version, read this file and `sparrow_sglang.plugin.hooks`, the table of what is
changed in SGLang. Every import, attribute or parameter of SGLang that some supported version lacks,
or has elsewhere, is looked up here. SGLang itself is imported only where a function needs it.
"""

import ast
import dataclasses
import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

SUPPORTED = ("0.5.17",)


class ServerField(NamedTuple):
    """A field of `ServerArgs`: its type, its default and the help of its flag."""

    kind: Any
    default: Any
    help: str


def version_problems() -> list[str]:
    """One sentence unless the installed SGLang is a supported version, which hooks are made for."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of an unknown version"
    if installed in SUPPORTED:
        return []
    return [
        f"SGLang {installed}: expected {' or '.join(SUPPORTED)}, as the"
        " hooks into another version could take no or a wrong effect; pip install"
        f" sglang=={SUPPORTED[-1]}"
    ]


def attention_backends(server_args: "ServerArgs") -> tuple[str, str]:
    """Names of the backends of prefill and of decode."""
    prefill, decode = server_args.get_attention_backends()
    return prefill, decode


@functools.cache
def server_argument_names() -> frozenset[str]:
    """Fields of SGLang's `ServerArgs`, read from its source, as importing it takes ten seconds.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
        RuntimeError: its source has no such class.
    """
    package = find_spec("sglang")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"SGLang is not installed: pip install sglang=={SUPPORTED[-1]}")
    source = Path(package.origin).with_name("srt") / "server_args.py"
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            targets = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return frozenset(target.id for target in targets if isinstance(target, ast.Name))
    raise RuntimeError(f"{source} has no class ServerArgs: need sglang {' or '.join(SUPPORTED)}")


def add_server_fields(cls: Any, fields: Mapping[str, ServerField]) -> None:
    """Add keyword-only fields at the end of `ServerArgs`, as its dataclass decorator would have.

    Raises:
        RuntimeError: this SGLang's ServerArgs is no dataclass.
    """
    if not hasattr(cls, "__dataclass_fields__"):
        raise RuntimeError(f"ServerArgs is no dataclass: need sglang {' or '.join(SUPPORTED)}")
    from sglang.srt.arg_groups import arg_utils

    for name, (kind, default, text) in fields.items():
        annotation = Annotated[kind, text, arg_utils.NS("exec.attention")]  # type: ignore[valid-type]
        field: Any = dataclasses.field(default=default)
        field.name, field.type, field.kw_only = name, annotation, True
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        cls.__annotations__[name] = annotation
        setattr(cls, name, default)
        cls.__dataclass_fields__[name] = field
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, field in fields.items():
            object.__setattr__(self, name, kwargs.pop(name, field.default))
        original(self, *args, **kwargs)

    cls.__init__ = __init__
    # Both are memoised per class and may have been asked before.
    arg_utils.namespace_of.cache_clear()
    arg_utils.resolvable_fields.cache_clear()


def without_insertion(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keyword arguments of `release_kv_cache` that keep a request's KV out of the prefix tree.

    None if `arguments`, those of the call, keep it out already.
    """
    if not arguments.get("is_insert", True):
        return None
    return {**arguments, "is_insert": False}
