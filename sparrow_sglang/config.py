"""Where a server's schedule is named, and the settings files of commands.

Imports neither torch nor SGLang.
"""

import os
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sparrow_sglang.environment import exported
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import cut, quoted, relative_note

SCHEDULE_VARIABLE = "SPARROW_SCHEDULE"
SOURCE_VARIABLE = "SPARROW_SCHEDULE_SOURCE"
"""Set by commands that pass a schedule on to an engine: the source that they took it from."""
AUTO = "auto"
MODEL_DEFAULT = "the model's default"


class ConfigError(InputError):
    """The schedule of a server is named in a way that cannot be used."""


def named_schedule(flag: str | None) -> tuple[str, str]:
    """The schedule that a server is to load, and where it is named.

    That is `flag`, --sparrow-schedule, else SPARROW_SCHEDULE, else "auto". Raises `ConfigError`.
    """
    source = os.environ.get(SOURCE_VARIABLE) or "--sparrow-schedule"
    value: object = flag
    if value is None:
        source, value = SCHEDULE_VARIABLE, os.environ.get(SCHEDULE_VARIABLE) or None
    if value is None:
        return AUTO, MODEL_DEFAULT
    if not isinstance(value, str) or not value.strip() or "," in value:
        raise ConfigError(
            f"{source}: {quoted(value)}: expected a shipped name, a path, fixed-<tokens> or"
            f" {AUTO!r}; a running server is switched to another schedule by set_schedule"
        )
    return value.strip(), source


def schedule_from(source: str) -> AbstractContextManager[None]:
    """Within, engines that are started report `source` as the source of their schedule."""
    return exported(SOURCE_VARIABLE, source)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML file's values; raises `InputError` if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}{relative_note(path)}: cannot be read ({error.strerror}); expected a TOML file"
        ) from None
    except (ValueError, RecursionError) as error:
        # Besides TOMLDecodeError, tomllib raises these on long numbers and deep arrays.
        raise InputError(f"{path}: not TOML ({cut(str(error))}); expected a TOML file") from None
