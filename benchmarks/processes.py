"""Processes that a benchmark starts: servers, and Python functions in a process of their own."""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import httpx
import psutil

from sparrow_sglang.schedule import PAGE_SIZE

# The first start on a new machine compiles kernels and captures graphs.
START_S = 900.0
STOP_S = 30.0
KILL_S = 10.0
_LOG_LINES = 30
_PORTS = range(20000, 22768)


class ProcessFailed(RuntimeError):
    """A process that was started has failed; a server's message ends with its last output."""


@dataclass(frozen=True)
class Server:
    """A process that serves `url`, in a session of its own; its output goes to `log`."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def is_healthy(self) -> bool:
        """Whether `url`/health answers 200. Raises `ProcessFailed` if the process has ended."""
        if self.process.poll() is not None:
            raise ProcessFailed(
                f"the server ended with code {self.process.returncode}:\n{log_end(self.log)}"
            )
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False  # not listening yet


@contextmanager
def running_server(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `command` with its output in `log`; the body starts once `url`/health answers 200.

    The server is stopped on leaving. Raises `ProcessFailed` if it ends or does not become healthy
    within 15 minutes.
    """
    with logged_process(command, log) as process:
        for _ in until_healthy([Server(process, url, log)], START_S):
            pass
        yield


@contextmanager
def logged_process(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stop_s: float = STOP_S,
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start `command`, in `env` and `folder` instead of ours if given; its output goes to `log`.

    On leaving, the process gets SIGTERM; processes of its session that are left after `stop_s`
    seconds are killed and waited for.
    """
    with log.open("w") as file:
        # In a session of its own, all workers of a server can be found and ended with it, and
        # our Ctrl-C does not reach them.
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            cwd=folder,
        )
    try:
        yield process
    finally:
        stop(process, stop_s)


def server_flags(model: Path, port: int, random_weights: bool, on_gpu: bool) -> list[str]:
    """Flags of any SGLang server that a benchmark measures."""
    flags = ["--model-path", str(model), "--page-size", str(PAGE_SIZE)]
    flags += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    if random_weights:
        # The word tokenizer has no end-of-text token, which a grammar would need.
        flags += ["--load-format", "dummy", "--grammar-backend", "none"]
    # In plain torch, 32-bit arithmetic is the fast path of most CPUs.
    return flags if on_gpu else [*flags, "--dtype", "float32"]


def with_modules(*folders: Path) -> dict[str, str]:
    """This process's environment, with `folders` at the front of PYTHONPATH."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a module-level function returns in a fresh Python process; None if that fails.

    A process is not reused because an engine leaves memory and signal handlers behind, and may
    break its process.
    """
    try:
        [result] = yielded_in_new_process(_returned, function, *arguments)
    except ProcessFailed:
        return None
    return result


def yielded_in_new_process(
    function: Callable[..., Iterator[Any]], *arguments: Any
) -> Generator[Any, None, None]:
    """Values that a module-level generator function yields in a fresh Python, as they are yielded.

    Closing the iterator kills the process. Raises `ProcessFailed` if the process ends before the
    function has returned.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    # While our copy of the sender is open, a message cut off by the death of the process would be
    # waited for forever.
    sender.close()
    try:
        while values := _received(receiver, process.sentinel):
            yield from values
        process.join()
    finally:
        process.kill()
        process.join()


def _received(receiver: "connection.Connection[Any, Any]", sentinel: int) -> list[Any]:
    """The next message of a process."""
    connection.wait([receiver, sentinel])
    if receiver.poll():
        with suppress(EOFError, OSError):
            message: list[Any] = receiver.recv()
            return message
    raise ProcessFailed("the process ended before its function returned")


def _send(sender: Any, function: Callable[..., Iterator[Any]], arguments: Sequence[Any]) -> None:
    """Send a message for each value, and an empty message at the end."""
    for value in function(*arguments):
        sender.send([value])
    sender.send([])


def _returned(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    yield function(*arguments)


def until_healthy(servers: Sequence[Server], limit_s: float) -> Iterator[float]:
    """Yield the seconds waited so far, every half second, until all servers are healthy.

    Raises `ProcessFailed` if one ends, or not all are healthy within `limit_s` seconds.
    """
    start = time.monotonic()
    # The list makes `all` check every server, so that the end of one is noticed while another is
    # still starting.
    while not all([server.is_healthy() for server in servers]):
        waited = time.monotonic() - start
        if waited > limit_s:
            logs = "\n".join(log_end(server.log) for server in servers)
            raise ProcessFailed(f"the server was not healthy after {limit_s:.0f} s:\n{logs}")
        yield waited
        time.sleep(0.5)


def log_end(log: Path) -> str:
    """The last lines of what a server has written."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def stop(process: "subprocess.Popen[Any]", wait_s: float = STOP_S) -> None:
    """Send SIGTERM to a process; kill what is left of its session after `wait_s` seconds.

    Returns once the whole session has ended, at the latest 10 seconds after it was killed.
    """
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    # Workers are not our children, and a killed one holds its memory and its port for a while.
    deadline = time.monotonic() + KILL_S
    while (left := _running_in(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()


def _running_in(session: int) -> list[int]:
    """Processes of a session that are not zombies, in any of its process groups."""
    running = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


def free_port() -> int:
    """A port of this machine that no process uses yet.

    It lies below Linux's ephemeral ports, which may be taken by another process before the server
    binds them. SGLang 0.5.15 wants the port 10,000 above it, too.
    """
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
