"""Processes that a benchmark starts: waited for, and ended with all that they have started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
from ports import free_port

from sparrow_sglang.benchmarks import processes
from sparrow_sglang.benchmarks.processes import (
    ProcessFailed,
    in_new_process,
    running_server,
    yielded_in_new_process,
)

SERVER = """
import http.server, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print("worker", worker.pid, flush=True)
born = time.monotonic()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/health" and time.monotonic() - born > 0.7
        self.send_response(200 if ready else 503)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_is_waited_for_and_ends_with_its_workers(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    start = time.monotonic()
    with running_server([sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}", log):
        assert time.monotonic() - start > 0.7
        worker = int(log.read_text().split()[1])
        assert is_running(worker)
    assert not is_running(worker)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('\\n'.join(f'line {i}' for i in range(100))); raise SystemExit('no such model')"
    with pytest.raises(ProcessFailed, match="ended with code 1") as failed:
        with running_server(
            [sys.executable, "-c", code], f"http://127.0.0.1:{free_port()}", tmp_path / "log"
        ):
            pytest.fail("it never was healthy")
    message = str(failed.value)
    assert "line 99" in message and "no such model" in message and "line 50\n" not in message


def test_sigterm_of_the_benchmark_ends_its_server(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    code = f"""
import sys, time
from pathlib import Path
from sparrow_sglang.benchmarks.options import exit_on_sigterm
from sparrow_sglang.benchmarks.processes import running_server
exit_on_sigterm()
command = [sys.executable, "-c", {SERVER!r}, "{port}"]
with running_server(command, "http://127.0.0.1:{port}", Path({str(log)!r})):
    print("running", flush=True)
    time.sleep(600)
"""
    bench = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None and bench.stdout.readline() == "running\n"
    worker = int(log.read_text().split()[1])
    os.kill(bench.pid, signal.SIGTERM)
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    bench.stdout.close()
    assert not is_running(worker)


def test_stopping_waits_for_workers_that_take_a_while_to_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill
    killed: set[int] = set()

    def kill_later(pid: int, signum: int) -> None:
        if signum != signal.SIGKILL:
            kill(pid, signum)
        elif pid not in killed:
            killed.add(pid)
            Timer(1, kill, (pid, signum)).start()

    monkeypatch.setattr(os, "kill", kill_later)
    port, log = free_port(), tmp_path / "server.log"
    with running_server([sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}", log):
        worker = int(log.read_text().split()[1])
    assert not is_running(worker)
    # A process that cannot be killed, such as one inside a driver call, outlives the wait for it.
    monkeypatch.setattr(
        os, "kill", lambda pid, signum: signum == signal.SIGKILL or kill(pid, signum)
    )
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    with running_server([sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}", log):
        worker = int(log.read_text().split()[1])
    assert is_running(worker)
    kill(worker, signal.SIGKILL)


def test_a_function_in_a_new_process_returns_or_fails_alone() -> None:
    assert in_new_process(os.path.join, "a", "b") == "a/b"
    assert in_new_process(os.getpid) != os.getpid()
    assert in_new_process(os.path.join, 1) is None
    assert in_new_process(os.abort) is None


def pid_then(wait_s: float, ends: str = "") -> Iterator[Any]:
    """Yield the process id, then, `wait_s` seconds later, nothing more, or end as `ends` says."""
    yield os.getpid()
    time.sleep(wait_s)
    if ends == "raises":
        raise ValueError
    if ends == "dies":
        os.abort()


def test_what_a_new_process_yields_comes_at_once() -> None:
    values = yielded_in_new_process(pid_then, 600)
    pid = next(values)
    assert pid != os.getpid() and is_running(pid)
    values.close()
    assert not is_running(pid)


def test_a_new_process_yields_all_values() -> None:
    assert list(yielded_in_new_process(range, 3)) == [0, 1, 2]


@pytest.mark.parametrize("ends", ["raises", "dies"])
def test_a_process_that_fails_after_a_value_has_failed(ends: str) -> None:
    values = yielded_in_new_process(pid_then, 0.1, ends)
    assert next(values) > 0
    with pytest.raises(ProcessFailed, match="ended before its function returned"):
        next(values)
