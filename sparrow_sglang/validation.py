"""Reasons for rejecting values from outside, in one line: field, value and what is allowed."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from sparrow_sglang.json_values import cut, quoted

_COMPARED = 100


def nearest_first(word: str, known: Iterable[str], cutoff: float = 0.0) -> list[str]:
    """The `known` names at least as similar to `word` as `cutoff`, 0 to 1, the nearest first."""
    names = list(known)
    return difflib.get_close_matches(word[:_COMPARED].lower(), names, len(names), cutoff)


def unknown_key(key: object, known: Iterable[str]) -> str:
    names = nearest_first(str(key), known)
    hint = f"did you mean {names[0]!r}? Known keys: {', '.join(names)}"
    return f"unknown key {quoted(key, 60)}: {hint}"


def first_problem(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first of pydantic's errors about `model`, an unknown key before all others. `prefix`
    names the section that the values lie in."""
    problems = error.errors(include_url=False)
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
    problem: Any = next(unknown, problems[0])
    loc, kind, value = problem["loc"], problem["type"], problem["input"]
    if kind == "extra_forbidden":
        section = _dotted((prefix, *loc[:-1]))
        hint = unknown_key(loc[-1], _section(model, loc[:-1]).model_fields)
        return f"[{section}] {hint}" if section else hint
    key, message = _dotted((prefix, *loc)), _in_toml_terms(problem["msg"])
    if kind == "missing" and isinstance(loc[-1], int):
        key, message = _dotted((prefix, *loc[:-1])), f"expected {loc[-1] + 1} values or more"
    elif kind == "missing":
        return f"{key} is missing: expected a value"
    if kind == "value_error" and isinstance(value, Mapping | BaseModel):
        return f"[{key}] {message}" if key else message
    return f"{key}={quoted(value, _COMPARED)} is not allowed: {message}"


def _in_toml_terms(message: str) -> str:
    message = message.removeprefix("Value error, ").partition(" or instance of ")[0]
    message = message.replace("valid tuple", "valid array").replace("dictionary", "table")
    if message.startswith("Input is not a valid path"):
        return "expected a path in quotes"
    return message.replace("Tuple should", "Value should")


def _dotted(loc: Iterable[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{cut(part)}" for part in loc)
    return "".join(part for part in parts if part != ".").removeprefix(".")


def _section(model: type[BaseModel], loc: Iterable[str | int]) -> type[BaseModel]:
    for part in loc:
        annotation = getattr(model.model_fields.get(str(part)), "annotation", None)
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
    return model
