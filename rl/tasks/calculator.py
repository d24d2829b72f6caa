"""A built-in task of several turns: arithmetic with long numbers, with the help of a calculator.

The model gets the value of the expression that it writes between `<calculator>` and
`</calculator>`, and ends its last turn with the answer.
"""

import ast
import operator
import random
import re
from collections.abc import Callable

from pydantic import Field

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.base import Message, Options, Render, Task, parse_options
from sparrow_sglang.rl.types import Prompt

_INSTRUCTION = (
    "Write an expression between <calculator> and </calculator> and stop to be told its value. When"
    ' you know the result, write "Answer:" and the number.'
)
_CALL = re.compile(r"<calculator>(.*?)</calculator>", re.DOTALL)
_ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*\.?\s*$")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MAX_EXPRESSION = 200
"""Most characters of an expression that is evaluated; products of so many digits take no time."""


class CalculatorOptions(Options):
    """Settings of this task."""

    terms: int = Field(default=3, ge=2, le=8)
    """Numbers in an expression."""
    digits: int = Field(default=4, ge=1, le=9)
    """Digits of each."""
    calls: int = Field(default=2, ge=0)
    """Turns that the calculator answers."""
    train: int = Field(default=960, ge=1)
    """Training prompts."""
    heldout: int = Field(default=128, ge=1)
    """Held-out prompts."""
    seed: int = 0
    """Seed of the expressions."""


def load(config: TaskSource, render: Render) -> Task:
    """The same prompts for the same options; raises `InputError` on options that are not valid."""
    options = parse_options(CalculatorOptions, config)
    draw = random.Random(options.seed)

    def prompt(number: int) -> Prompt:
        smallest = 10 ** (options.digits - 1)
        expression = str(draw.randrange(smallest, 10 * smallest))
        for _ in range(options.terms - 1):
            expression += f" {draw.choice('+-*')} {draw.randrange(smallest, 10 * smallest)}"
        ids = render([{"role": "user", "content": f"What is {expression}? {_INSTRUCTION}"}])
        payload = {"answer": evaluate(expression), "calls": options.calls}
        return Prompt(str(number), config.name, ids, payload)

    prompts = tuple(prompt(number) for number in range(options.heldout + options.train))
    heldout, train = prompts[: options.heldout], prompts[options.heldout :]
    return Task(train, heldout, reward, reply)


def reply(prompt: Prompt, turns: tuple[str, ...]) -> Message | None:
    """The value of the last expression in the last turn, if there is one and calls are left."""
    calls = _CALL.findall(turns[-1])
    if not calls or len(turns) > prompt.payload["calls"]:
        return None
    try:
        value = str(evaluate(calls[-1]))
    except (ValueError, SyntaxError) as error:
        value = f"error: {error}"
    # The role is "user", as every chat template has it.
    return {"role": "user", "content": value}


def reward(prompt: Prompt, text: str) -> float:
    """1 if the last turn, `text`, ends with "Answer:" and the right number, else 0."""
    found = _ANSWER.search(text)
    return float(found is not None and int(found[1]) == prompt.payload["answer"])


def evaluate(expression: str) -> int:
    """The value of an expression of integers, +, -, * and parentheses.

    Raises `ValueError` or `SyntaxError` on anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"more than {MAX_EXPRESSION} characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only integers, +, -, * and parentheses")
