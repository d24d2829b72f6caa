"""Mathematics: the final answer of a response, compared to the expected "answer" of a row."""

import re
from collections.abc import Mapping
from typing import Any

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.answers import conclusion, last_box
from sparrow_sglang.rl.tasks.base import FileOptions, Render, Task, load_files, parse_options
from sparrow_sglang.rl.tasks.equality import equal
from sparrow_sglang.rl.tasks.expressions import library
from sparrow_sglang.rl.tasks.formats import require
from sparrow_sglang.rl.types import Prompt

# "the answer is ...", to the end of the sentence, or "#### ...".
_STATED = re.compile(
    r"(?:\b(?:answer|option|choice|result|solution)\b[^.\n]{0,40}?"
    r"(?:\bis\b|\bequals\b|\bshould be\b|:|=)|(?<!#)####(?!#)(?:\s*(?:final )?answer\b)?)[\s:*]*"
    r"(.+?)(?=\.(?:\s|$)|[!?\n]|\*\*|$)",
    re.IGNORECASE | re.MULTILINE,
)
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# A number in bold that does not count a heading, or a name and its number.
_BOLD = re.compile(r"\*\*(?:\w+: ?)?((?:\w+ ?= ?)?-?(?!\d+[.):]\s)\d[^*\n]*|\$[\d.,]+)\*\*")
# Formulas of one list.
_FORMULAS = re.compile(
    rf"(?:{_FORMULA.pattern})(?:(?:[,\s]|\b(?:and|or)\b)+(?:{_FORMULA.pattern}))*", re.DOTALL
)
_VERB = re.compile(r"\b(?:is|are|equals)\b:?")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?(?![\w])")
# What the sentence after a box, or after its unit, may begin with.
_MARK = (
    r"(?:(?:or(?: alternatively)?|oh|no|wait|hm+|oops|sorry|actually|rather|maybe|perhaps|possibly"
    r"|edit|correction|scratch that|make that|i (?:think|believe|meant?)"
    r"|(?:up)?on (?:second thought|reflection))\b[^\w$\\]*)"
)
_START = r"(?:\$+|\\[)\]])?[^\w$\\]*(?i:(?:[a-z]+[.!]\W+)?"
# It takes the box back.
_RETRACTED = re.compile(
    rf"{_START}{_MARK}*(?:(?:that|this|it|i|which|(?:(?:that|this|my|the(?: above)?) )?answer)?"
    r"(?:'s| ?\b(?:is|was)) (?:wrong|incorrect|a mistake|not (?:right|correct))\b(?! to )"
    r"|(?:i made an? (?:\w+ )?(?:mistake|error)|my mistake|let me correct"
    r"|ignore (?:that|this|the above))\b))"
)
# It is, or has as "the answer", nothing but this value and a unit.
_OTHER = re.compile(
    rf"{_START}(?:{_MARK}+(?:(?:it|that|this)(?:'s| is))?"
    rf"|{_MARK}*(?:(?:so|thus|hence|therefore|alternatively)\W*)?(?:(?:it|that|this) should be"
    r"|(?:(?:the|my|an|another|final|correct|right|possible|alternative) )*answer"
    r"(?: (?:is|(?:should|could|may|might|must)(?: also)? be))?))[\s:,*]*)"
    rf"({_FORMULA.pattern}|{_NUMBER.pattern}|[B-H]\b)"
    r"(?: is\b|(?: [a-zA-Z]+)?[\s)*]*(?:[.!?](?!\d)|[,;](?!\s*[-\d$])|\n|$))"
)


def load(config: TaskSource, render: Render) -> Task:
    options = parse_options(FileOptions, config)
    return load_files(config, render, _payload, options, reward, "math")


def import_libraries() -> None:
    library()


def reward(prompt: Prompt, text: str, finish_reason: str = "stop") -> float:
    """1 if the final answer in `text` equals the expected one, else 0. It is the last box after the
    thinking; without one what "the answer is" names, else the last formula, else the only number.
    Text after a box may take it back or name another answer: then there is none."""
    answer = conclusion(text, finish_reason, prompt.payload.get("thinking", False))
    expected = prompt.payload["answer"]
    if answer is None:
        return 0.0
    box = last_box(answer)
    if box is None:
        return float(equal(expected, _without_box(answer)))
    content, rest = box
    return float(equal(expected, content) and not _is_taken_back(expected, rest))


def _is_taken_back(expected: str, rest: str) -> bool:
    """Whether the sentence after the box, `rest`, says so, or has another answer of this kind."""
    other = _OTHER.match(rest)
    # The letter of a choice may follow its value.
    is_another = (
        other and other[1].isalpha() == expected.isalpha() and not equal(expected, other[1])
    )
    return bool(is_another or _RETRACTED.match(rest))


def _without_box(text: str) -> str:
    stated = _STATED.findall(text)
    if stated:
        claim = _VERB.split(stated[-1])[-1].strip()
        formulas = _FORMULAS.match(claim)
        return formulas.group() if formulas else claim
    found = re.findall(f"{_FORMULA.pattern}|{_BOLD.pattern}", text, re.DOTALL)
    if found:
        return next(filter(None, found[-1]))
    numbers = set(_NUMBER.findall(text))
    if len(numbers) == 1 and not re.search(r"\\[a-z]", text):
        return numbers.pop()
    # A bare expression, without words.
    return "" if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", text) else text


def _payload(example: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "answer": str(require(example, "answer", (str, int, float), "a number or a string")),
    }
