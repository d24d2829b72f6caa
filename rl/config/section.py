"""What the sections of a run's configuration have in common."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Strict


def _usable(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("expected a path without NUL characters")
    return path


_Array = TypeVar("_Array")
# What TOML has no type of its own for.
TomlPath = Annotated[Path, Strict(False), AfterValidator(_usable)]
TomlArray = Annotated[_Array, Strict(False)]


class Section(BaseModel):
    # Strict, or `steps = true` would be one step and "16" a number.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
    )
