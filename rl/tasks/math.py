"""Mathematics: the final answer of a response, judged by `math-verify`.

Data files hold "prompt" and "answer": a number, or a text in LaTeX or plain notation.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks.base import (
    FileOptions,
    Render,
    Task,
    load_files,
    parse_options,
    require,
)
from sparrow_sglang.rl.types import Prompt


def load(config: TaskConfig, render: Render) -> Task:
    """Prompts out of `config`'s files; raises `ConfigError` as `base.load_files` does."""
    options = parse_options(FileOptions, config)
    train, heldout = load_files(config, render, _payload, options)
    return Task(train, heldout, reward)


def reward(prompt: Prompt, text: str) -> float:
    """1 if the last answer in `text` equals the expected one, else 0.

    May take long on a hostile expression. The library's own time-outs are off: they are alarms,
    which work in main threads only and do not interrupt C code; whoever scores sets the limit.
    """
    verify = _library()
    expected = _parse(prompt.payload["answer"])
    return float(verify(expected, _parse(text), timeout_seconds=None))


def _payload(example: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = str(require(example, "answer", (str, int, float), "a number or a text"))
    # The library finds LaTeX between dollars or in a box only; plain numbers it finds anyway.
    return {"answer": answer if "$" in answer or "\\boxed" in answer else f"${answer}$"}


def _parse(text: str) -> Any:
    import math_verify

    return math_verify.parse(text, parsing_timeout=None)


@cache
def _library() -> Any:
    import logging

    import math_verify

    # It warns once per process that its time-outs are off, which is meant.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify.verify
