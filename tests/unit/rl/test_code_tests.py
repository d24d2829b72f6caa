"""Which outputs of programs, and values of functions, are the expected ones."""

import pytest

from sparrow_sglang.rl.tasks.code_tests import passes


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("5", "5", True),
        ("5.0", "5", True),
        ("5.", "5", True),
        (".5 1e3", "0.5 1000.0", True),
        ("0.333333333", "0.3333333333", True),
        ("1_0", "10", False),
        ("+5", "5", False),
        ("\uff15", "5", False),
        ("\u0665", "5", False),
        ("True", "1", False),
        ("nan", "NaN", False),
        ("inf", "Infinity", False),
        ("0x5", "5", False),
        ("5 6", "5", False),
    ],
)
def test_tokens_are_equal_as_written_or_as_plain_numbers(
    printed: str, expected: str, same: bool
) -> None:
    assert passes(f"{printed}\n", {"output": expected}, None) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ("1", "1", True),
        ("1.0", "1", True),
        ("true", "true", True),
        ("true", "1", False),
        ("1", "true", False),
        ("true", "1.0", False),
        ("[0, [false]]", "[false, [0]]", False),
        ('{"a": 1}', '{"a": true}', False),
        ('"1"', "1", False),
        ("null", "0", False),
    ],
)
def test_values_are_equal_and_of_a_kind(value: str, expected: str, same: bool) -> None:
    assert passes(value, {"output": expected}, "f") is same
