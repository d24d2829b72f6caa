"""Mathematics: the final answer of a response, compared to the expected "answer" of a row."""

import re
from collections.abc import Mapping
from typing import Any

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.answers import conclusion, last_box
from sparrow_sglang.rl.tasks.base import FileOptions, Render, Task, load_files, parse_options
from sparrow_sglang.rl.tasks.equality import equal
from sparrow_sglang.rl.tasks.expressions import library
from sparrow_sglang.rl.tasks.formats import messages_of, require
from sparrow_sglang.rl.types import Prompt

# "the answer is ...", or "#### ...", to the end of the sentence.
_STATED = re.compile(
    r"(?:\b(?:answer|option|choice|result|solution)\b[^.\n]{0,40}?"
    r"(?:\bis\b|\bequals\b|\bshould be\b|:|=)|^####)[\s:*]*"
    r"(.+?)(?=\.(?:\s|$)|[!?\n]|\*\*|$)",
    re.IGNORECASE | re.MULTILINE,
)
# "... is the answer".
_NAMED = re.compile(
    r"(\$[^$]+\$|\\\(.+?\\\)|-?\\?[\w.\\{}/]*\d[\w.\\{}/]*) (?:is|must be|should be|would be|seems)"
    r"(?: \w+){0,3} answer\b",
    re.IGNORECASE,
)
_CORRECTED = re.compile(
    r"\b(?:actually|correction|scratch that|rather|i mean|i meant|make that|should be"
    r"|(?:sorry|oops|hmm|wait|no),? (?:it is|it's))\b[,:]?\s*(?:it is|it's|the \w+ is)?\s*"
    r"(\$[^$]+\$|\\\(.+?\\\)|-?\\?[\w.\\{}/]*\d[\w.\\{}/]*)",
    re.IGNORECASE,
)
_RETRACTED = re.compile(
    r"(?:^\W*|\b(?:that|this|it)'|\b(?:(?:that|this|my)(?: (?:answer|result|solution))?|it) )"
    r"(?:is|was|s) (?:wrong|incorrect|not right|not correct|a mistake)\b",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# Formulas of one list.
_FORMULAS = re.compile(
    rf"(?:{_FORMULA.pattern})(?:(?:[,\s]|\b(?:and|or)\b)+(?:{_FORMULA.pattern}))*", re.DOTALL
)
_VERB = re.compile(r"\b(?:is|are|equals)\b:?")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?(?![\w])")


def load(config: TaskSource, render: Render) -> Task:
    options = parse_options(FileOptions, config)
    return load_files(config, render, _payload, options, reward, "math")


def import_libraries() -> None:
    library()


def reward(prompt: Prompt, text: str, finish_reason: str = "stop") -> float:
    """1 if the final answer in `text` equals the expected one, else 0. It is the last box after the
    thinking; without one what "the answer is" names, else the last formula, else the only number.
    Text after a box may take it back or name another answer: then there is none. The caller must
    set a time limit; see `equality.equal`."""
    answer = conclusion(text, finish_reason, prompt.payload.get("thinking", False))
    expected, question = prompt.payload["answer"], prompt.payload.get("question", "")
    if answer is None:
        return 0.0
    box = last_box(answer)
    if box is None:
        return float(equal(expected, _without_box(answer), question))
    content, rest = box
    if not equal(expected, content, question) or _RETRACTED.search(rest):
        return 0.0
    return float(all(equal(expected, other) for other in _other_answers(rest)))


def _other_answers(rest: str) -> list[str]:
    """Formulas or numbers that the text after a box names as the answer."""
    stated = [_FORMULA.search(text) or _NUMBER.search(text) for text in _STATED.findall(rest)]
    named = [*_CORRECTED.findall(rest), *_NAMED.findall(rest)]
    return [match.group() for match in stated if match] + named


def _without_box(text: str) -> str:
    stated = _STATED.findall(text)
    if stated:
        claim = _VERB.split(stated[-1])[-1].strip()
        formulas = _FORMULAS.match(claim)
        return formulas.group() if formulas else claim
    found = _FORMULA.findall(text)
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
        "question": "\n".join(message["content"] for message in messages_of(example)),
    }
