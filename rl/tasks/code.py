"""Programming: a Python program that is run on tests in a sandbox. Data files hold "prompt" and
"tests", see `code_tests`; with "fn_name" tests are of that function."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.sandbox.run import (
    BUBBLEWRAP,
    Limits,
    SandboxResult,
    check_sandbox,
    run_inputs,
)
from sparrow_sglang.rl.tasks.answers import conclusion, last_program
from sparrow_sglang.rl.tasks.base import FileOptions, Render, Task, load_files, parse_options
from sparrow_sglang.rl.tasks.code_tests import (
    IMPORTS,
    function_program,
    passes,
    read_tests,
    stdin_program,
)
from sparrow_sglang.rl.types import Prompt

_READS_INPUT = re.compile(r"\binput\b|\bstdin\b|\bopen\(0|\bread\(0|\bfileinput\b")
_MISSING_NAME = re.compile(r"^NameError: name '\w+' is not defined", re.MULTILINE)
# Tests that share a container, at most.
_LARGEST_BATCH = 64
Outcome = Literal["passed", "wrong", "failed", "late", "skipped"]


def _sandbox_name(name: str) -> str:
    if name != BUBBLEWRAP and not re.match(r"https?://[^/]", name):
        raise ValueError(f"expected {BUBBLEWRAP!r} or the URL of a SandboxFusion server")
    return name


class CodeOptions(FileOptions):
    wall_clock_s: float = Field(default=6.0, gt=0)
    """Time for a program to finish one test."""
    response_s: float = Field(default=25.0, gt=0)
    """Time for all tests of a response, after which its reward is missing unless a test has failed.
    `task.reward_timeout_s` should be longer."""
    max_tests: int | None = Field(default=None, ge=1)
    """Most tests of a problem, chosen evenly; all by default."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory of each of a program's processes."""
    sandbox: Annotated[str, AfterValidator(_sandbox_name)] = BUBBLEWRAP
    """"bubblewrap", or the URL of a server with the HTTP interface of SandboxFusion."""
    score: Literal["all", "fraction"] = "all"
    """"all": 1 if every test is passed, else 0; "fraction": the share of tests passed."""


def load(config: TaskSource, render: Render) -> Task:
    options = parse_options(CodeOptions, config)
    check_sandbox(options.sandbox)
    settings = {
        "limits": {"wall_clock_s": options.wall_clock_s, "memory_bytes": options.memory_mib << 20},
        "response_s": options.response_s,
        "sandbox": options.sandbox,
        "score": options.score,
    }

    def payload(example: Mapping[str, Any]) -> Mapping[str, Any]:
        read = read_tests(example)
        tests, most = read["tests"], options.max_tests
        if most is not None and most < len(tests):
            tests = [tests[number * len(tests) // most] for number in range(most)]
        return read | settings | {"tests": tests}

    return load_files(config, render, payload, options, reward, "code")


def reward(prompt: Prompt, text: str, finish_reason: str = "stop") -> dict[str, float | None]:
    """1 if the program in `text` passes every test, else 0; or the share of tests passed. The
    program is the last fenced block that reads stdin, or defines the function. A test is passed if
    the program ends by itself with status 0 and prints what is expected. The score is None if the
    time for a response is over before any test has failed. Raises `ValueError` without tests, as
    any program would pass them, and `SandboxError`."""
    payload = prompt.payload
    tests = payload["tests"]
    if not tests:
        raise ValueError(f"prompt {prompt.id!r} has no tests: expected at least one")
    answer = conclusion(text, finish_reason, payload.get("thinking", False))
    program = None if answer is None else _program(answer, payload.get("fn_name"))
    outcomes: Sequence[Outcome] = ["failed"] if program is None else run_tests(payload, program)
    counts, total = Counter(outcomes), len(tests)
    share = counts["passed"] / total
    score = share if payload.get("score") == "fraction" else float(share == 1)
    unknown = counts["skipped"] and counts["passed"] + counts["skipped"] == total
    return {
        "score": None if unknown else score,
        "tests_passed": share,
        "tests_failed": 0.0 if program is None else counts["failed"] / total,
        "tests_late": counts["late"] / total,
    }


def run_tests(payload: Mapping[str, Any], program: str) -> list[Outcome]:
    """The outcome of each test, in order: "wrong" result, "failed" by an error or too much memory,
    "late". Tests are "skipped" after the time for a response or, with score "all", after the first
    failure."""
    tests, name = payload["tests"], payload.get("fn_name")
    limits, sandbox = Limits(**payload["limits"]), payload["sandbox"]
    source = function_program(program, name) if name else stdin_program(program)
    deadline = time.monotonic() + payload.get("response_s", float("inf"))
    outcomes: list[Outcome] = []
    size = 1
    while len(outcomes) < len(tests) and (left := deadline - time.monotonic()) > 0:
        batch = tests[len(outcomes) : len(outcomes) + size]
        results = run_inputs(source, [test["input"] for test in batch], limits, sandbox, left)
        unnamed = any(one.returncode and _MISSING_NAME.search(one.stderr) for one in results)
        if unnamed and not name and IMPORTS not in source:
            # Graders of the field import the usual modules first; most programs do not need it.
            source = stdin_program(f"{IMPORTS}\n{program}")
            continue
        for test, result in zip(batch, results, strict=False):
            outcomes.append(_outcome(result, test, name, payload.get("tolerance")))
        if payload.get("score") != "fraction" and set(outcomes) != {"passed"}:
            break
        # Wrong programs fail early.
        size = min(2 * size, _LARGEST_BATCH)
    return outcomes + ["skipped"] * (len(tests) - len(outcomes))


def _outcome(
    result: SandboxResult, test: Mapping[str, Any], name: str | None, tolerance: float | None
) -> Outcome:
    if result.late:
        return "late"
    if not result.succeeded:
        return "failed"
    return "passed" if passes(result.stdout, test, name, tolerance) else "wrong"


def _program(answer: str, function: str | None) -> str | None:
    if function:
        defined = re.compile(rf"\bdef {re.escape(function)}\b|^\s*{re.escape(function)}\s*=", re.M)
        return last_program(answer, lambda body: bool(defined.search(body)))
    return last_program(answer, lambda body: bool(_READS_INPUT.search(body)))
