"""Processes that a benchmark starts: waited for, and ended with all that they have started."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from ports import free_port

from sparrow_sglang.benchmarks.common import in_fresh_process
from sparrow_sglang.benchmarks.serving import running_server

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


def test_sigterm_of_the_benchmark_ends_its_server(tmp_path: Path) -> None:
    port, log, out = free_port(), tmp_path / "server.log", tmp_path / "out.json"
    code = f"""
import argparse, sys, time
from pathlib import Path
from sparrow_sglang.benchmarks.common import begin
from sparrow_sglang.benchmarks.serving import running_server
begin(argparse.ArgumentParser(), argparse.Namespace(out=Path({str(out)!r})))
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


def test_a_function_in_a_fresh_process_fails_alone() -> None:
    assert in_fresh_process(time.sleep, 0)
    assert not in_fresh_process(os.path.join, 1)
    assert not in_fresh_process(os.abort)
