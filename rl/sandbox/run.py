"""Runs Python programs of a model in the sandbox "bubblewrap", or on a SandboxFusion server by
URL."""

import math
from collections.abc import Sequence

from sparrow_sglang.rl.sandbox.bubblewrap import (
    START_UP_S,
    Limits,
    SandboxError,
    SandboxResult,
    run_contained,
)
from sparrow_sglang.rl.sandbox.remote import run_remotely

BUBBLEWRAP = "bubblewrap"
_TRIAL = "import numpy\nprint(input()[::-1])"


def run_inputs(
    source: str,
    inputs: Sequence[str],
    limits: Limits,
    sandbox: str = BUBBLEWRAP,
    seconds: float = math.inf,
) -> list[SandboxResult]:
    """Run `source` on the first of these inputs for stdin; one result at least, unless `seconds`
    are over before. Raises `SandboxError`."""
    if sandbox == BUBBLEWRAP:
        return run_contained(source, inputs, limits, seconds)
    result = run_remotely(source, inputs[0], limits, seconds, sandbox)
    return [] if result is None else [result]


def run_python(
    source: str, stdin: str = "", limits: Limits | None = None, sandbox: str = BUBBLEWRAP
) -> SandboxResult:
    return run_inputs(source, [stdin], limits or Limits(), sandbox)[0]


def check_sandbox(sandbox: str) -> None:
    """Raises `SandboxError`, one line with the remedies, unless programs can be run in it."""
    problem = sandbox_problem(sandbox)
    if problem is None:
        return
    if sandbox != BUBBLEWRAP:
        raise SandboxError(f"{problem}; expected the address of a SandboxFusion server that runs")
    raise SandboxError(
        "programs of the model need a sandbox. bubblewrap does not work here:"
        f' {problem}. Run "apt-get install -y bubblewrap" (0.8 or newer) where namespaces are'
        " allowed (a container needs --privileged), or set task.options.sandbox ="
        ' "http://HOST:8080", the address of a SandboxFusion server'
    )


def sandbox_problem(sandbox: str) -> str | None:
    """Why `sandbox` does not work, by a trial run of a program; None if it works."""
    try:
        result = run_python(_TRIAL, "abc", Limits(wall_clock_s=START_UP_S), sandbox)
    except (SandboxError, OSError) as error:
        return str(error)
    if result.stdout == "cba\n" and result.succeeded:
        return None
    reason = " ".join(result.stderr.split()) or f"status {result.returncode}"
    return f"a trial run failed ({'time limit' if result.late else reason})"
