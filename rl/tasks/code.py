"""Programming: a Python program that is run on tests in a sandbox.

Data files hold "prompt" and "tests", a list of objects with "input" and "output": what a program
reads from stdin and prints or, with "fn_name", the arguments and the value of that function.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.sandbox.run import (
    BUBBLEWRAP,
    Limits,
    SandboxError,
    check_sandbox,
    run_python,
    weakness,
)
from sparrow_sglang.rl.tasks.answers import conclusion, last_program
from sparrow_sglang.rl.tasks.base import (
    FileOptions,
    Render,
    Task,
    load_files,
    parse_options,
)
from sparrow_sglang.rl.tasks.code_tests import IMPORTS, function_program, passes, read_tests
from sparrow_sglang.rl.types import Prompt

logger = logging.getLogger(__name__)

_READS_INPUT = re.compile(r"\binput\b|\bstdin\b|\bopen\(0|\bread\(0|\bfileinput\b")
_MISSING_NAME = re.compile(r"^NameError: name '\w+' is not defined", re.MULTILINE)
Outcome = Literal["passed", "wrong", "failed", "late", "skipped"]


def _sandbox_name(name: str) -> str:
    if name != BUBBLEWRAP and not re.match(r"https?://[^/]", name):
        raise ValueError(f"expected {BUBBLEWRAP!r} or the URL of a SandboxFusion server")
    return name


class CodeOptions(FileOptions):
    """Settings of this task."""

    wall_clock_s: float = Field(default=6.0, gt=0)
    """Time for a program to finish one test."""
    response_s: float = Field(default=25.0, gt=0)
    """Time for all tests of a response; those left then count as failed. `task.reward_timeout_s`
    should be longer."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory of a program and its children together."""
    sandbox: Annotated[str, AfterValidator(_sandbox_name)] = BUBBLEWRAP
    """"bubblewrap", or the URL of a server with the HTTP interface of SandboxFusion."""
    score: Literal["all", "fraction"] = "all"
    """"all": 1 if every test is passed, else 0; "fraction": the share of tests passed."""


def load(config: TaskSource, render: Render) -> Task:
    """Prompts from `config`'s files.

    Raises `InputError` as `base.load_files` does, and if the sandbox does not work.
    """
    options = parse_options(CodeOptions, config)
    try:
        check_sandbox(options.sandbox)
    except SandboxError as error:
        raise InputError(f"task.options.sandbox={options.sandbox!r}: {error}") from None
    if weak := weakness(options.sandbox):
        logger.warning("sandbox: %s", weak)
    settings = {
        "limits": {"wall_clock_s": options.wall_clock_s, "memory_bytes": options.memory_mib << 20},
        "response_s": options.response_s,
        "sandbox": options.sandbox,
        "score": options.score,
    }

    def payload(example: Mapping[str, Any]) -> Mapping[str, Any]:
        return read_tests(example) | settings

    return load_files(config, render, payload, options, reward, "code")


def reward(prompt: Prompt, text: str, finish_reason: str = "stop") -> dict[str, float]:
    """1 if the program in `text` passes every test, else 0; or the share of tests passed.

    The program is the last fenced block that reads stdin, or defines the function, and is labelled
    as Python or not at all. A test is passed if the program ends by itself, with status 0, and
    prints what is expected (see `code_tests.passes`). With score "all" the first failure ends the
    tests. Sub-scores are the shares of tests passed, and of those that failed with an error and
    that were late. Raises `ValueError` if there are no tests, as any program would pass them, and
    `SandboxError` if the sandbox does not work.
    """
    payload = prompt.payload
    tests = payload["tests"]
    if not tests:
        raise ValueError(f"prompt {prompt.id!r} has no tests: expected at least one")
    answer = conclusion(text, finish_reason, payload.get("thinking", False))
    program = None if answer is None else _program(answer, payload.get("fn_name"))
    outcomes: Sequence[Outcome] = [] if program is None else run_tests(payload, program)
    counts, total = Counter(outcomes), len(tests)
    share = counts["passed"] / total
    return {
        "score": share if payload.get("score") == "fraction" else float(share == 1),
        "tests_passed": share,
        "tests_failed": counts["failed"] / total,
        "tests_late": counts["late"] / total,
    }


def run_tests(payload: Mapping[str, Any], program: str) -> list[Outcome]:
    """The outcome of each test of a prompt, in order.

    "wrong" is another result than expected, "failed" an error or too much memory, "late" more than
    the time of a test. Tests are "skipped" after the time for a response or, unless the score is a
    fraction, after the first one that is not passed.
    """
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + payload.get("response_s", float("inf"))
    for test in payload["tests"]:
        left = deadline - time.monotonic()
        stop = payload.get("score") != "fraction" and any(one != "passed" for one in outcomes)
        if stop or left <= 0:
            outcomes.append("skipped")
        else:
            outcomes.append(_run_test(payload, program, test, left))
    return outcomes


def _run_test(
    payload: Mapping[str, Any], program: str, test: Mapping[str, Any], left: float
) -> Outcome:
    limits = dict(payload["limits"])
    limits["wall_clock_s"] = min(limits["wall_clock_s"], left)
    name = payload.get("fn_name")
    source = function_program(program, name) if name else program
    result = run_python(source, test["input"], Limits(**limits), payload["sandbox"])
    if not name and result.returncode and _MISSING_NAME.search(result.stderr):
        # Graders of the field import the usual modules first; most programs do not need it.
        source = f"{IMPORTS}\n{program}"
        result = run_python(source, test["input"], Limits(**limits), payload["sandbox"])
    if result.limit == "wall_clock":
        return "late"
    if not result.succeeded:
        return "failed"
    return "passed" if passes(result.stdout, test, name, payload.get("tolerance")) else "wrong"


def _program(answer: str, function: str | None) -> str | None:
    if function:
        defined = re.compile(rf"\bdef {re.escape(function)}\b|^\s*{re.escape(function)}\s*=", re.M)
        return last_program(answer, lambda body: bool(defined.search(body)))
    return last_program(answer, lambda body: bool(_READS_INPUT.search(body)))
