"""Tests of programs. "input" is the text for stdin, "output" what is printed; for functions both
are JSON, the input a list of arguments."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from math import isclose
from typing import Any

from sparrow_sglang.json_values import quoted

TOLERANCE = 1e-6
# What LiveCodeBench's checker makes available to each program.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools"
    " operator io sys json"
).split()
IMPORTS = "\n".join(
    [f"from {name} import *" for name in [*_MODULES, "builtins", "typing"]]
    + [f"import {', '.join(_MODULES)}"]
)
# Fields that name a judge other than a comparison of outputs.
CHECKERS = ("checker", "generated_checker", "special_judge", "spj", "checker_code", "interactor")
_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_EXPECTED = "a list of objects with input and output"
# As LiveCodeBench's checker sets it; and integers of any length.
_LIMITS = "import sys; sys.setrecursionlimit(50_000); sys.set_int_max_str_digits(0)\n"
_FUNCTION = """
import json as _json, sys as _sys
_stdout, _sys.stdout = _sys.stdout, _sys.stderr
_names = dict(globals(), __name__="solution")
exec(compile({program!r}, "solution.py", "exec"), _names)
_owner = _names.get("Solution")
_function = getattr(_owner() if _owner else None, {name!r}, None) or _names[{name!r}]
_value = _function(*_json.loads(_sys.stdin.read()))
def _plain(value):
    if hasattr(value, "tolist"):
        return value.tolist()
    return float(value) if hasattr(value, "__float__") else list(value)
_stdout.write(_json.dumps(_value, default=_plain))
"""


def read_tests(example: Mapping[str, Any]) -> dict[str, Any]:
    """Also reads "tests" as JSON, and as an object of lists "inputs" and "outputs" (APPS, TACO,
    PRIME), where a function's expected value may be alone in a list. Raises `ValueError`."""
    tests = _decoded(example.get("tests"))
    name, wrapped = example.get("fn_name"), False
    owners = [example]
    if isinstance(tests, Mapping):
        owners.append(tests)
        name, wrapped = tests.get("fn_name") or name, True
        tests = _paired(tests)
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"tests={quoted(example.get('tests'))}: expected {_EXPECTED}, not empty")
    for one in (*owners, *tests):
        if not isinstance(one, Mapping):
            raise ValueError(f"tests holds {quoted(one)}: expected {_EXPECTED}")
        for field in CHECKERS:
            if one.get(field):
                raise ValueError(f"{field}={quoted(one[field])}: outputs need this special checker")
    names = {str(each) for each in (name, *map(_function_of, tests)) if each}
    if len(names) > 1:
        raise ValueError(f"fn_name={sorted(names)}: expected one function")
    function = names.pop() if names else None
    read = _function_test if function else _stdin_test
    tolerance = example.get("tolerance")
    if tolerance is not None and (type(tolerance) not in (int, float) or not 0 <= tolerance < 1):
        raise ValueError(f"tolerance={tolerance!r}: expected a number from 0 to below 1")
    return {
        "tests": [
            read(test) | ({"wrapped": True} if wrapped and function else {}) for test in tests
        ],
        "fn_name": function,
        "tolerance": tolerance,
    }


def stdin_program(program: str) -> str:
    """Imports from `__future__` must come first."""
    return program if "__future__" in program else _LIMITS + program


def function_program(program: str, name: str) -> str:
    """Calls a function of `program` or of its class `Solution`, on JSON arguments; prints the value
    as JSON. What the function prints goes to stderr."""
    return _LIMITS + IMPORTS + _FUNCTION.format(program=program, name=name)


def passes(
    stdout: str, test: Mapping[str, Any], function: str | None, tolerance: float | None = None
) -> bool:
    """Outputs are compared by tokens, and numbers by value: those expected with decimals up to a
    relative or absolute `tolerance`, others exactly."""
    limit = TOLERANCE if tolerance is None else tolerance
    if function is None:
        actual, expected = stdout.split(), test["output"].split()
        if actual == expected:
            return True
        pairs = zip(actual, expected, strict=False)
        return len(actual) == len(expected) and all(_same_token(*pair, limit) for pair in pairs)
    try:
        actual, expected = (
            json.loads(text, parse_int=_integer) for text in (stdout, test["output"])
        )
    except (ValueError, RecursionError):
        return False
    alone = test.get("wrapped") and isinstance(expected, list) and len(expected) == 1
    return _same_value(actual, expected, limit) or bool(
        alone and _same_value(actual, expected[0], limit)
    )


def _integer(digits: str) -> int | Decimal:
    """A `Decimal` beyond the digits that Python converts to an integer."""
    return int(digits) if len(digits) <= 4300 else Decimal(digits)


def _same_token(actual: str, expected: str, tolerance: float) -> bool:
    if actual == expected:
        return True
    # Python reads more than this as a number, such as 1_0, +5 and digits of other scripts.
    if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    numbers = Decimal(actual), Decimal(expected)
    if numbers[0] == numbers[1]:
        return True
    decimals = any(mark in expected.lower() for mark in ".e")
    return decimals and isclose(*map(float, numbers), rel_tol=tolerance, abs_tol=tolerance)


def _same_value(actual: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list) and isinstance(actual, list):
        same = len(actual) == len(expected)
        return same and all(map(_same_value, actual, expected, [tolerance] * len(actual)))
    if isinstance(expected, dict) and isinstance(actual, dict):
        same = actual.keys() == expected.keys()
        return same and all(_same_value(actual[key], expected[key], tolerance) for key in actual)
    if isinstance(expected, float) and type(actual) in (int, float):
        return isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance)
    return isinstance(actual, bool) == isinstance(expected, bool) and bool(actual == expected)


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"tests={quoted(value)}: not JSON; expected {_EXPECTED}") from None


def _paired(tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"tests={quoted(tests)}: expected lists inputs and outputs, as long")
    pairs = zip(inputs, outputs, strict=True)
    return [{"input": one, "output": other} for one, other in pairs]


def _function_of(test: Mapping[str, Any]) -> Any:
    metadata = test.get("metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return test.get("fn_name") or name


def _stdin_test(test: Mapping[str, Any]) -> dict[str, Any]:
    texts = {field: _lines(test.get(field, ...)) for field in ("input", "output")}
    if None in texts.values():
        raise ValueError(f"tests holds {quoted(test)}: expected {_EXPECTED}, both strings")
    return texts


def _lines(value: Any) -> str | None:
    """The text of a string, a list of lines or null; None for other values."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else None


def _function_test(test: Mapping[str, Any]) -> dict[str, Any]:
    if "input" not in test or "output" not in test:
        raise ValueError(f"tests holds {quoted(test)}: expected {_EXPECTED}")
    value = test["input"]
    if isinstance(value, str):
        # LiveCodeBench: one argument a line.
        arguments = [_json(line) for line in value.split("\n") if line.strip()]
    else:
        arguments = [json.dumps(each) for each in (value if isinstance(value, list) else [value])]
    output = test["output"]
    text = _json(output) if isinstance(output, str) else json.dumps(output)
    return {"input": f"[{', '.join(arguments)}]", "output": text}


def _json(text: str) -> str:
    """`text` if it is JSON, else as a JSON string."""
    try:
        json.loads(text, parse_int=_integer)
    except ValueError:
        return json.dumps(text)
    return text
