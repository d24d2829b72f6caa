"""Runs programs of a model in bubblewrap, or on a SandboxFusion server by URL."""

import math
import time
from collections.abc import Sequence
from typing import Any

import httpx

from sparrow_sglang.rl.sandbox.bubblewrap import (
    START_UP_S,
    Limits,
    SandboxError,
    SandboxResult,
    run_contained,
)

BUBBLEWRAP = "bubblewrap"
_PATH = "/run_code"
# Time for a request beyond the program's own, spent waiting in the server's queue.
QUEUE_S = 30.0
ATTEMPTS, PAUSE_S = 3, 0.5
_TRY_AGAIN = (429, 502, 503, 504)

_TRIAL = "import numpy\nprint(input()[::-1])"


def run_inputs(
    source: str,
    inputs: Sequence[str],
    limits: Limits,
    sandbox: str = BUBBLEWRAP,
    seconds: float = math.inf,
) -> list[SandboxResult]:
    """Run `source` on the first of these inputs for stdin; one result at least, unless `seconds`
    are over before. `sandbox` may be the URL of a server, with or without "/run_code", which runs
    one input; requests are retried within `seconds` if it is busy or unreachable. Raises
    `SandboxError`."""
    if sandbox == BUBBLEWRAP:
        return run_contained(source, inputs, limits, seconds)
    body = {
        "code": source,
        "stdin": inputs[0],
        "language": "python",
        "compile_timeout": limits.wall_clock_s,
        "run_timeout": limits.wall_clock_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    address = sandbox.removesuffix("/").removesuffix(_PATH) + _PATH
    reply = _post(address, body, limits.wall_clock_s + QUEUE_S, time.monotonic() + seconds)
    if reply is None:
        return []
    result = reply.get("run_result") or {}
    if reply.get("status") not in ("Success", "Failed") or "status" not in result:
        reason = reply.get("message") or reply
        raise SandboxError(f"{sandbox}: no result of the program: {reason}")
    code = result.get("return_code")
    if result["status"] == "TimeLimitExceeded":
        code = None
    elif not isinstance(code, int):
        code = -1
    return [SandboxResult(code, result.get("stdout") or "", result.get("stderr") or "")]


def _post(
    url: str, body: dict[str, Any], patience: float, deadline: float
) -> dict[str, Any] | None:
    problem: object = None
    for attempt in range(ATTEMPTS):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            response = httpx.post(url, json=body, timeout=min(left, patience))
            reply = response.json() if response.is_success else None
        except (httpx.TransportError, ValueError) as error:
            problem = error
        else:
            if isinstance(reply, dict):
                return reply
            problem = f"status {response.status_code} {response.reason_phrase}, no JSON object"
            if response.status_code not in _TRY_AGAIN:
                break
        time.sleep(PAUSE_S * (attempt + 1))
    raise SandboxError(f"{url}: {problem}")


def run_python(
    source: str, stdin: str = "", limits: Limits | None = None, sandbox: str = BUBBLEWRAP
) -> SandboxResult:
    return run_inputs(source, [stdin], limits or Limits(), sandbox)[0]


def check_sandbox(sandbox: str) -> None:
    """Raises `SandboxError`, one line with the remedies, unless programs can be run in it."""
    problem = sandbox_problem(sandbox)
    if problem is None:
        return
    remedy = "expected the address of a SandboxFusion server that runs"
    if sandbox == BUBBLEWRAP:
        remedy = (
            'run "apt-get install -y bubblewrap" (0.8 or newer) where namespaces are allowed (a'
            ' container needs --privileged), or set task.options.sandbox = "http://HOST:8080" to a'
            " SandboxFusion server"
        )
    raise SandboxError(f"task.options.sandbox={sandbox!r}: {problem}; {remedy}")


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
