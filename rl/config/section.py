"""The base class and types that the sections of a run's configuration share."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict


def _usable(path: object) -> object:
    if path == "":
        raise ValueError("expected a path, not an empty string")
    if "\0" in str(path):
        raise ValueError("expected a path without NUL characters")
    return path


_Array = TypeVar("_Array")
# Paths and tuples, for which TOML has no types: strings and arrays are accepted for them.
TomlPath = Annotated[Path, Strict(False), BeforeValidator(_usable)]
TomlArray = Annotated[_Array, Strict(False)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    # Without `strict`, `steps = true` would mean one step, and "16" would be taken as a number.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
    )
