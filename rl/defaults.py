"""A training file with every setting at its default and its meaning, made from `TrainConfig`."""

import json
import textwrap
import types
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from sparrow_sglang.rl.config import TrainConfig

# Example values of the settings that have no default.
EXAMPLES = {"run_dir": "runs/my-run", "name": "story"}
_WIDTH = 98


def commented_defaults() -> str:
    """TOML that `TrainConfig.load` reads; settings without a value are commented out."""
    return "".join(f"{line}\n" for line in _section("", TrainConfig))


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    tables: list[tuple[str, type[BaseModel], bool]] = []
    for name, field in section.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        if isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            tables.append((name, kinds[0], types.NoneType in kinds))
            continue
        value = (
            EXAMPLES.get(name)
            if field.is_required()
            else field.get_default(call_default_factory=True)
        )
        yield from _comment(field.description)
        yield f"# {name} = ..." if value is None else f"{name} = {_toml(value)}"
    for name, kind, optional in tables:
        yield ""
        yield from _comment(kind.__doc__)
        # A section that changes what a run does by being there is commented out.
        for line in (f"[{path}{name}]", *_section(f"{path}{name}.", kind)):
            yield f"# {line}" if optional and not line.startswith("#") else line


def _comment(text: str | None) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join((text or "").split()), _WIDTH)]


def _toml(value: Any) -> str:
    """Strings, numbers, booleans and arrays are written in TOML as in JSON, and so is {}."""
    return json.dumps(value)
