"""Programs run by a server with the HTTP interface of SandboxFusion (bytedance/SandboxFusion).

In: source, stdin and limits, as the body of POST /run_code. Out: a `SandboxResult`.
"""

import time
from typing import Any

import httpx

from sparrow_sglang.rl.sandbox.base import Limits, SandboxError, SandboxResult

PATH = "/run_code"
# Time for a request beyond the program's own, in which it may wait for its turn.
QUEUE_S = 30.0
ATTEMPTS, PAUSE_S = 3, 0.5
_TRY_AGAIN = (429, 502, 503, 504)


def run_remotely(source: str, stdin: str, limits: Limits, url: str) -> SandboxResult:
    """Run a program on the server at `url`, given with or without "/run_code".

    A server that is busy or not reachable is asked again. Raises `SandboxError` if it gives no
    result.
    """
    body = {
        "code": source,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limits.wall_clock_s,
        "run_timeout": limits.wall_clock_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    answer = _post(url.removesuffix("/").removesuffix(PATH) + PATH, body, limits.wall_clock_s)
    result = answer.get("run_result") or {}
    if answer.get("status") not in ("Success", "Failed") or "status" not in result:
        raise SandboxError(f"{url}: no result of the program: {answer.get('message') or answer}")
    late = result["status"] == "TimeLimitExceeded"
    code = result.get("return_code")
    return SandboxResult(
        "wall_clock" if late else None,
        code if isinstance(code, int) else -1,
        result.get("stdout") or "",
        result.get("stderr") or "",
    )


def _post(url: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    for attempt in range(ATTEMPTS):
        try:
            response = httpx.post(url, json=body, timeout=seconds + QUEUE_S)
            answer = response.json() if response.is_success else None
        except (httpx.TransportError, ValueError) as error:
            problem: object = error
        else:
            if isinstance(answer, dict):
                return answer
            problem = f"status {response.status_code} {response.reason_phrase}, no JSON object"
            if response.status_code not in _TRY_AGAIN:
                break
        time.sleep(PAUSE_S * (attempt + 1))
    raise SandboxError(f"{url}: {problem}")
