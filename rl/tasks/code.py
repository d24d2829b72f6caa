"""Programming: a Python program that reads stdin and writes stdout, tested in the sandbox.

Data files hold "prompt" and "tests", a list of objects with the strings "input" and "output".
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.sandbox.run import (
    Kind,
    Limits,
    SandboxError,
    check_sandbox,
    run_python,
    weaknesses,
)
from sparrow_sglang.rl.tasks.base import (
    FileOptions,
    Render,
    Task,
    load_files,
    parse_options,
    require,
)
from sparrow_sglang.rl.types import Prompt

logger = logging.getLogger(__name__)

# Every fenced block with its label: without the others, the end of one would be taken for a start.
BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
PYTHON = ("python", "python3", "py")


class CodeOptions(FileOptions):
    """Settings of this task; the limits hold for one test each."""

    wall_clock_s: float = Field(default=6.0, gt=0)
    """Time for a program to finish one test."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory of a program and its children together."""
    sandbox: Kind = "bubblewrap"
    """"weak" does without bubblewrap; the log says what is then not kept from programs."""


def load(config: TaskSource, render: Render) -> Task:
    """Prompts from `config`'s files.

    Raises `InputError` as `base.load_files` does, and if the sandbox does not work.
    """
    options = parse_options(CodeOptions, config)
    try:
        check_sandbox(options.sandbox)
    except SandboxError as error:
        raise InputError(f"task.options.sandbox={options.sandbox!r}: {error}") from None
    if options.sandbox == "weak":
        logger.warning("WEAK SANDBOX: does not keep programs from: %s", "; ".join(weaknesses()))

    def payload(example: Mapping[str, Any]) -> Mapping[str, Any]:
        limits = {"wall_clock_s": options.wall_clock_s, "memory_bytes": options.memory_mib << 20}
        return {"tests": _tests(example), "limits": limits, "sandbox": options.sandbox}

    train, heldout = load_files(config, render, payload, options, ["tests"])
    return Task(train, heldout, reward)


def reward(prompt: Prompt, text: str) -> float:
    """1 if the last fenced program in `text` passes every test, else 0.

    That is the last block labelled as Python or, without one, the last without a label. A test is
    passed if the program ends by itself, with status 0, and prints what is expected, up to white
    space at the ends of lines and of the output. Raises `ValueError` if there are no tests, as any
    program would pass them.
    """
    if not prompt.payload["tests"]:
        raise ValueError(f"prompt {prompt.id!r} has no tests: expected at least one")
    blocks = [(label.strip().lower(), body) for label, body in BLOCK.findall(text)]
    labelled = [body for label, body in blocks if label in PYTHON]
    programs = labelled or [body for label, body in blocks if not label]
    if not programs:
        return 0.0
    seconds = prompt.payload["limits"]["wall_clock_s"]
    limits = Limits(**prompt.payload["limits"], cpu_s=int(seconds) + 1)
    for test in prompt.payload["tests"]:
        result = run_python(programs[-1], test["input"], limits, prompt.payload["sandbox"])
        if not result.succeeded or _lines(result.stdout) != _lines(test["output"]):
            return 0.0
    return 1.0


def _tests(example: Mapping[str, Any]) -> list[dict[str, str]]:
    expected = "a list of objects with the strings input and output"
    tests = require(example, "tests", (list,), expected)
    for test in tests:
        fields = isinstance(test, dict) and [test.get("input"), test.get("output")]
        if not fields or not all(isinstance(field, str) for field in fields):
            raise ValueError(f"tests holds {test!r}: expected {expected}")
    return [{"input": test["input"], "output": test["output"]} for test in tests]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
