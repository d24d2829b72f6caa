"""Programs run by a server with the HTTP interface of SandboxFusion (bytedance/SandboxFusion)."""

import time
from typing import Any

import httpx

from sparrow_sglang.rl.sandbox.bubblewrap import Limits, SandboxError, SandboxResult

PATH = "/run_code"
# Time for a request beyond the program's own, in which it may wait for its turn.
QUEUE_S = 30.0
ATTEMPTS, PAUSE_S = 3, 0.5
_TRY_AGAIN = (429, 502, 503, 504)


def run_remotely(
    source: str, stdin: str, limits: Limits, seconds: float, url: str
) -> SandboxResult | None:
    """Run a program on the server at `url`, with or without "/run_code". A server that is busy or
    unreachable is asked again, within `seconds`; None if they are over. Raises `SandboxError`."""
    body = {
        "code": source,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limits.wall_clock_s,
        "run_timeout": limits.wall_clock_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    address = url.removesuffix("/").removesuffix(PATH) + PATH
    answer = _post(address, body, limits.wall_clock_s + QUEUE_S, time.monotonic() + seconds)
    if answer is None:
        return None
    result = answer.get("run_result") or {}
    if answer.get("status") not in ("Success", "Failed") or "status" not in result:
        raise SandboxError(f"{url}: no result of the program: {answer.get('message') or answer}")
    code = result.get("return_code")
    if result["status"] == "TimeLimitExceeded":
        code = None
    elif not isinstance(code, int):
        code = -1
    return SandboxResult(code, result.get("stdout") or "", result.get("stderr") or "")


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
            answer = response.json() if response.is_success else None
        except (httpx.TransportError, ValueError) as error:
            problem = error
        else:
            if isinstance(answer, dict):
                return answer
            problem = f"status {response.status_code} {response.reason_phrase}, no JSON object"
            if response.status_code not in _TRY_AGAIN:
                break
        time.sleep(PAUSE_S * (attempt + 1))
    raise SandboxError(f"{url}: {problem}")
