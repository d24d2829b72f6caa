"""A small server with the HTTP interface of SandboxFusion, for programs of the tests only."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def sandbox_server(refusals: int = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address and requests of a server that answers its first `refusals` requests with 503."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            if self.path != "/run_code" or len(requests) <= refusals:
                self.send_error(503 if self.path == "/run_code" else 404)
                return
            answer = json.dumps(run_code(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *message: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def run_code(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of POST /run_code."""
    if body["code"] == "broken":
        return {"status": "SandboxError", "message": "no runner left", "run_result": None}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", body["code"]],
            input=body["stdin"] or "",
            capture_output=True,
            text=True,
            timeout=body["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        return {"status": "Failed", "message": "", "compile_result": None, "run_result": result}
    result = {
        "status": "Finished",
        "execution_time": time.perf_counter() - began,
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
    status = "Failed" if done.returncode else "Success"
    return {"status": status, "message": "", "compile_result": None, "run_result": result}
