"""The few settings that a user may choose, and the channels by which they arrive.

In: the value of SGLang's `sparrow_schedule` field, the model's Hugging Face config (where
`json_model_override_args` lands) and the environment. Out: a frozen `SparrowConfig` and where it
came from. Imports neither torch nor SGLang.
"""

import json
import os
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictStr, ValidationError

from sparrow_sglang.environment import exported
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import cut, quoted, relative_note
from sparrow_sglang.validation import first_problem

CONFIG_VARIABLE = "SPARROW_CONFIG"
SCHEDULE_VARIABLE = "SPARROW_SCHEDULE"
SOURCE_VARIABLE = "SPARROW_SCHEDULE_SOURCE"
"""Set by commands that pass a schedule on to an engine: the source that they took it from."""
AUTO = "auto"
MODEL_DEFAULT = "the model's default"


class ConfigError(InputError):
    """A setting of this package cannot be used, whichever way it was given."""


class SparrowConfig(BaseModel):
    """What the backend needs to know from its user.

    `schedule` is a shipped name, a path to a .json file, fixed-<tokens>, or "auto" for the shipped
    schedule that fits the model. It may be several of these, separated by commas: the first is in
    force, and requests may ask for the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: StrictStr = AUTO

    @property
    def schedules(self) -> tuple[str, ...]:
        """The parts of `schedule`, the one that is active first."""
        return tuple(part.strip() for part in self.schedule.split(","))

    @classmethod
    def resolve(cls, server_args_value: str | None, hf_config: Any) -> "tuple[SparrowConfig, str]":
        """The settings that apply and their source, the first one that names a schedule.

        The sources, in order: the ServerArgs field; `{"sparrow": {...}}` in
        `json_model_override_args`, which SGLang puts on the model's config; SPARROW_CONFIG (a path,
        or the JSON object itself); SPARROW_SCHEDULE; the default. Every source is validated, even
        if it is not used.

        Raises:
            ConfigError: a source cannot be read, or holds an unknown key or a wrong value.
        """
        override = getattr(hf_config, "sparrow", None)
        variable = os.environ.get(CONFIG_VARIABLE)
        sources = (
            (os.environ.get(SOURCE_VARIABLE) or "--sparrow-schedule", _one(server_args_value)),
            ("json_model_override_args", {} if override is None else override),
            (CONFIG_VARIABLE, _read(variable) if variable else {}),
            (SCHEDULE_VARIABLE, _one(os.environ.get(SCHEDULE_VARIABLE) or None)),
        )
        parsed = [(cls._parse(source, values), source) for source, values in sources]
        for config, source in parsed:
            if "schedule" in config.model_fields_set:
                return config, source
        return cls(), MODEL_DEFAULT

    @classmethod
    def _parse(cls, source: str, values: Any) -> "SparrowConfig":
        if not isinstance(values, dict):
            raise ConfigError(
                f"{source}: holds a {type(values).__name__}; expected a JSON object with the keys"
                f" {', '.join(cls.model_fields)}"
            )
        try:
            config = cls(**values)
        except ValidationError as error:
            problem = first_problem(error, cls, {"schedule": "a string"})
            raise ConfigError(f"{source}: {problem}") from None
        if not all(config.schedules):
            raise ConfigError(
                f"{source}: schedule={quoted(config.schedule)} is empty or has an empty part:"
                f" expected a name, a path or {AUTO!r}, or several separated by commas"
            )
        return config


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


def _one(schedule: str | None) -> dict[str, str]:
    return {} if schedule is None else {"schedule": schedule}


def _read(value: str) -> Any:
    """The JSON value in `value` itself or in the file that it names."""
    inline = value.lstrip().startswith("{")
    where = CONFIG_VARIABLE if inline else f"{CONFIG_VARIABLE}={value}"
    try:
        return json.loads(value if inline else Path(value).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); expected a path to a JSON file, or the"
            f' JSON object itself, such as {{"schedule": "{AUTO}"}}'
        ) from None
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); expected a JSON object") from None
