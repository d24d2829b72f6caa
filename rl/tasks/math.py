"""Mathematics: the final answer of a response, checked by `math-verify`.

Data files hold "prompt" and "answer": a number, or a string in LaTeX or plain notation.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.base import (
    FileOptions,
    Render,
    Task,
    load_files,
    parse_options,
    require,
)
from sparrow_sglang.rl.types import Prompt

THINK, END_OF_THINK, BOX = "<think>", "</think>", "\\boxed{"
# Words that retract an answer after it was boxed.
RETRACTION = re.compile(
    r"\b(?:wait|hmm+|oops|sorry|wrong|incorrect|mistaken?|not (?:right|correct)|actually|instead"
    r"|correction|let me|let's|no(?=\s*[,.!:;-]))\b",
    re.IGNORECASE,
)
RESTATED = re.compile(r"\banswer\s*(?:is|should be|must be|=|:)", re.IGNORECASE)


def load(config: TaskSource, render: Render) -> Task:
    """Prompts from `config`'s files; raises `InputError` as `base.load_files` does."""
    options = parse_options(FileOptions, config)
    train, heldout = load_files(config, render, _payload, options, ["answer"])
    return Task(train, heldout, reward)


def reward(prompt: Prompt, text: str, finish_reason: str = "stop") -> float:
    """1 if the final answer in `text` equals the expected one, else 0.

    A response that was cut at the length limit or is still thinking has no final answer. The final
    answer is looked for after `</think>`. It is the last `\\boxed{}`, unless the text after it
    retracts it or names another answer; without a box it is what `math-verify` takes for the last
    answer.

    May take long on a hostile expression. The library's own time-outs are off: they are alarms,
    which work in main threads only and do not interrupt C code. The caller must set a time limit.
    """
    answer = text.rpartition(END_OF_THINK)[2]
    if finish_reason == "length" or THINK in answer:
        return 0.0
    verify = _library()
    expected = _parse(prompt.payload["answer"])
    named = [answer]
    if BOX in answer:
        box, rest = _last_box(answer)
        if RETRACTION.search(rest):
            return 0.0
        named = [box, rest] if RESTATED.search(rest) else [box]
    return float(all(verify(expected, _parse(part), timeout_seconds=None) for part in named))


def _last_box(text: str) -> tuple[str, str]:
    """The last box with its content, and what follows; an unclosed one is empty."""
    start = text.rindex(BOX)
    depth = 0
    # Braces after a backslash are printed characters, and do not group.
    for token in re.finditer(r"\\.|[{}]", text[start + len("\\boxed") :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0 and token.group() == "}":
            end = start + len("\\boxed") + token.end()
            return text[start:end], text[end:]
    return "", ""


def _payload(example: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = str(require(example, "answer", (str, int, float), "a number or a string"))
    # The library finds LaTeX only between dollars or in a box, but plain numbers anywhere. A dollar
    # after a backslash is a printed one.
    delimited = re.search(r"(?<!\\)\$", answer) or "\\boxed" in answer
    return {"answer": answer if delimited else f"${answer}$"}


def _parse(text: str) -> Any:
    import math_verify

    return math_verify.parse(text, parsing_timeout=None)


@cache
def _library() -> Any:
    import logging

    import math_verify

    # The library warns once per process that its time-outs are off, which is intended here.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify.verify
