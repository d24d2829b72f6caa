"""A server in a process group of its own: started, waited for until it is healthy, and stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

# The first start on a new machine compiles kernels and captures graphs.
START_S = 900.0
STOP_S = 30.0
_LOG_LINES = 30


class ServerFailed(RuntimeError):
    """The server did not become healthy; the message holds the end of its log."""


@contextmanager
def running_server(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `command`, whose output goes to `log`, from when `url`/health answers 200.

    On leaving it is asked to end, and what is left of its process group after half a minute is
    killed. Raises `ServerFailed` if it ends or does not become healthy within 15 minutes.
    """
    with log.open("w") as file:
        # A group of its own: a server's workers must end with it, and not on our Ctrl-C alone.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_healthy(process, url, log)
        yield
    finally:
        _stop(process)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server was not healthy after {START_S:.0f} s:\n{_end(log)}")
        time.sleep(0.5)
    raise ServerFailed(f"the server ended with code {process.returncode}:\n{_end(log)}")


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
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
