"""Requests over HTTP: answers in order, and an error of one of them ends the call at once."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from sparrow_sglang.client.endpoint import connect


class Handler(BaseHTTPRequestHandler):
    """Answers each request after `wait_s`, with status 400 if it asks for that."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(body["wait_s"])
        answer = json.dumps({"text": body["wait_s"], "error": "no"}).encode()
        self.send_response(400 if body.get("fails") else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_answers_come_in_the_order_of_the_requests(url: str) -> None:
    waits = [0.2, 0.0, 0.1]
    answers = connect(url).generate([{"wait_s": wait} for wait in waits])
    assert [answer["text"] for answer in answers] == waits
    assert connect(url).generate([]) == []
