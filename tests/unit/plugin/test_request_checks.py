"""Regular expressions that a server searches for after every token."""

import re
import time

import pytest

from sparrow_sglang.plugin.launcher.request_checks import regex_problem

SLOW = [
    ".{0,7}" * 12 + "\\0",
    "(?:.|.)" * 25 + "\\0",
    r"(?:(?:.|..){7}){7}\0",
    "(" * 2000 + "a" + ")" * 2000,
    r"(\w+\s?)+!",
    "a*a*b",
    "(a|aa)*b",
    "(a?)*b",
    "(a*)?(a*)?b",
    "a?" * 30 + "a" * 30,
    r"(?=(a|aa)+)b",
    r"(a)(?(1)b*|c*)d*",
    r"(a{0,9000})\1b",
    "(?:a?){40}b",
    "(?>(?:a|aa)*)b",
]


@pytest.mark.parametrize("pattern", SLOW, ids=lambda pattern: pattern[:20])
def test_slow_patterns_are_refused(pattern: str) -> None:
    assert regex_problem(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "STOP",
        r"\n\n(?:Human|User|Assistant): ?",
        r"</?answer>",
        r"####\s*-?[0-9]",
        r"\\boxed\{[^}]*\}",
        "[.!?] ?\n",
        r"(['\"])stop\1",
        r"^\d+$",
        "|".join(f"stop{number}" for number in range(40)),
        "colou?rs?",
    ],
)
def test_usual_patterns_are_served_in_no_time(pattern: str) -> None:
    assert regex_problem(pattern) is None
    before = time.monotonic()
    re.search(pattern, "a1 <stop" * 2000)
    assert time.monotonic() - before < 2
