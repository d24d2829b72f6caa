"""A server in a process group of its own: started, waited for until it is healthy, and stopped."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

# The first start on a new machine compiles kernels and captures graphs.
START_S = 900.0
STOP_S = 30.0
_LOG_LINES = 30


class ServerFailed(RuntimeError):
    """The server did not become healthy; the message holds the end of its log."""


@dataclass(frozen=True)
class Server:
    """A process that serves `url`, in a group of its own; its output goes to `log`."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def is_healthy(self) -> bool:
        """Whether `url`/health answers 200. Raises `ServerFailed` if the process has ended."""
        if self.process.poll() is not None:
            raise ServerFailed(
                f"the server ended with code {self.process.returncode}:\n{log_end(self.log)}"
            )
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False  # not listening yet


@contextmanager
def running_server(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `command`, whose output goes to `log`, from when `url`/health answers 200.

    It is stopped on leaving. Raises `ServerFailed` if it ends or does not become healthy within
    15 minutes.
    """
    with started_server(command, url, log) as server:
        for _ in until_healthy([server], START_S):
            pass
        yield


@contextmanager
def started_server(
    command: Sequence[str], url: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start `command`, in `env` instead of this environment if given; do not wait for it.

    On leaving it is asked to end, and what is left of its process group after half a minute is
    killed.
    """
    with log.open("w") as file:
        # A group of its own: a server's workers must end with it, and not on our Ctrl-C alone.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
    try:
        yield Server(process, url, log)
    finally:
        stop(process)


def until_healthy(servers: Sequence[Server], limit_s: float) -> Iterator[float]:
    """Seconds waited so far, again and again until all of them are healthy.

    Raises `ServerFailed` if one ends, or not all are healthy within `limit_s` seconds.
    """
    start = time.monotonic()
    # A list, so that the end of one is seen while another is still starting.
    while not all([server.is_healthy() for server in servers]):
        waited = time.monotonic() - start
        if waited > limit_s:
            logs = "\n".join(log_end(server.log) for server in servers)
            raise ServerFailed(f"the server was not healthy after {limit_s:.0f} s:\n{logs}")
        yield waited
        time.sleep(0.5)


def log_end(log: Path) -> str:
    """The last lines of what a server has written."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def stop(process: "subprocess.Popen[Any]") -> None:
    """Ask a process to end; kill what is left of its process group after half a minute."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def free_port() -> int:
    """A port of this machine that nobody uses yet.

    SGLang 0.5.15 wants the port 10,000 above it, too.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port <= 55535:
            return port
