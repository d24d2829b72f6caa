"""Regular expressions that a server searches for after every token."""

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import tokenized

from sparrow_sglang.plugin.launcher.request_checks import require_servable
from sparrow_sglang.plugin.scheduler.stop_regex import compiled
from sparrow_sglang.schedules.options import RequestError

USUAL = [
    "STOP",
    r"\n\n(?:Human|User|Assistant): ?",
    r"</?answer>",
    "|".join(f"stop{number}" for number in range(40)),
    r"(?i)the\W+end",
    "ÉTÉ|été",
    r"(?im:^end$)|(?-i:A)\b",
    r"(?s:a.b)|c.d",
    r"\wé|\bend\B|\bthe\b",
    r"(\w+\s?)+!",
    "(?P<name>(a|aa)*b)",
    r"\Aw|[[:d]\]",
    r"[^a-yé]{3}",
    r"\{,2}",
]
PIECES = [*"aAbBwWeEé٣3_\n\r \u00a0.!-}", "end", "the", "STOP", "\n\n", "User: ", "stop7", "été"]
PIECES += ["\\boxed{", "</answer>", "#### ", "日本", "\u2028", "\U0001f600", "\0", "d]", "color"]
SLOW = [
    ".{0,7}" * 12 + "\\0",
    "(a?)*b",
    "a?" * 30 + "a" * 30,
    "(a|c)*a(a|c){60}b",
]
REFUSED = [
    *(r"(['\"])stop\1", "(?<=ab)c*", "\n\n+(?=Q:)", r"(a)(?(1)b*|c*)d", "(?>(?:a|aa)*)b"),
    *("a{0,1001}", "(?:.{30}){33}", r"end\Z", "a{,2}b", r"a\\{,2}b"),
]


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.sampled_from(USUAL), st.lists(st.sampled_from(PIECES), max_size=6))
def test_what_is_found_is_what_re_finds_by_ascii(pattern: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = compiled([pattern]).search(text.encode())
    assert bool(found) == bool(re.search(pattern, text, re.ASCII))
    assert bool(compiled(["nothing", pattern]).search(text.encode())) == bool(found)


def test_a_dollar_is_the_end_of_the_text() -> None:
    expression = compiled([r"^\d+$"])
    assert expression.search(b"37") and not expression.search(b"37\n")


@pytest.mark.parametrize("pattern", SLOW, ids=lambda pattern: pattern[:20])
def test_time_is_linear_in_the_text(pattern: str) -> None:
    text = "".join(random.Random(0).choices("ac", k=8000)).encode()
    expression = compiled([pattern])
    seconds = []
    for end in (1000, 8000):
        before = time.monotonic()
        assert not expression.search(text[:end])
        seconds.append(time.monotonic() - before)
    # `re` takes more than that for the first hundred characters of most of these.
    assert max(seconds) < 0.5, seconds


def check(*patterns: str) -> None:
    require_servable(tokenized(stop_regex_strs=list(patterns)), 256, 4096)


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_what_cannot_be_searched_for_is_named(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"^stop_regex=.*: .*expected \S+") as refused:
        check("STOP", pattern)
    assert repr(pattern)[1:20] in str(refused.value)


def test_all_patterns_of_a_request_are_bounded_together() -> None:
    with pytest.raises(RequestError, match=r"^stop_regex=\['.*: \d+ instructions, expected 1000"):
        check(*(f"{letter}{{0,90}}!" for letter in "abcdefghijk"))
