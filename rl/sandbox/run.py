"""Runs Python programs that a model has written: in a container here, or by a server.

In: source, stdin and limits. Out: a `SandboxResult`. A sandbox is named "bubblewrap", or by the URL
of a server with the HTTP interface of SandboxFusion.
"""

from sparrow_sglang.rl.sandbox.base import Limits, SandboxError, SandboxResult
from sparrow_sglang.rl.sandbox.bubblewrap import run_contained
from sparrow_sglang.rl.sandbox.cgroup import usable_parents
from sparrow_sglang.rl.sandbox.remote import run_remotely

BUBBLEWRAP = "bubblewrap"
START_UP_S = 20.0
_TRIAL = "import numpy\nprint(input()[::-1])"


def run_python(
    source: str, stdin: str = "", limits: Limits | None = None, sandbox: str = BUBBLEWRAP
) -> SandboxResult:
    """Run `source` with the standard library and numpy.

    Raises `SandboxError` if this sandbox does not work.
    """
    limits = limits or Limits()
    if sandbox == BUBBLEWRAP:
        return run_contained(source, stdin, limits)
    return run_remotely(source, stdin, limits, sandbox)


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
    reason = result.limit or " ".join(result.stderr.split()) or f"status {result.returncode}"
    return f"a trial run failed ({reason})"


def weakness(sandbox: str) -> str | None:
    """What a program can do beyond its limits in this sandbox, None if nothing is known."""
    if sandbox != BUBBLEWRAP or usable_parents():
        return None
    return (
        "no control group can be made here: each process of a program may take the memory allowed,"
        f" and a program may have {Limits().processes} of them"
    )
