"""`--set section.key=value`: settings on the command line that override those of a file.

In: nested values of a TOML file, and KEY=VALUE strings. Out: the overridden values, unchecked.
"""

import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from sparrow_sglang.errors import InputError


def with_overrides(
    values: Mapping[str, Any], settings: Sequence[str], model: type[BaseModel]
) -> dict[str, Any]:
    """`values` overridden by each KEY=VALUE of `settings`; of several for one key the last holds.

    A value is read as TOML. It is taken as it is if `model` has a string or a path there, or if it
    is no TOML. Raises `InputError` on a setting that is not KEY=VALUE.
    """
    result = dict(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise InputError(
                f"--set {setting!r}: expected KEY=VALUE, the key with its section, such as"
                " optimizer.lr=3e-6"
            )
        _put(result, path, _value(text.strip(), _annotation(model, path)))
    return result


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    first, *rest = path
    if not rest:
        values[first] = value
        return
    below = values.get(first)
    # Copied, so that the caller's values do not change.
    values[first] = dict(below) if isinstance(below, Mapping) else {}
    _put(values[first], rest, value)


def _annotation(model: Any, path: Sequence[str]) -> Any:
    """The type annotation of the field at `path`, None if `model` has no such field."""
    for name in path:
        fields = model.model_fields if _is_section(model) else {}
        model = fields[name].annotation if name in fields else None
    return model


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _value(text: str, annotation: Any) -> Any:
    if _holds_text(annotation) and not text.startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _holds_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return all(_holds_text(part) for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is Literal:
        return isinstance(get_args(annotation)[0], str)
    return annotation in (str, Path)
