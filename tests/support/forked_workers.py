"""Workers of Ray that are forked from a process that has imported SGLang, which takes each 20 s.
Run as a program, it stands in for Python where Ray starts a worker: it hands over its arguments,
environment, folder and files to the process that forks, and ends with the worker and all that this
has started."""

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from functools import cache

RAY = {
    # Ray's own limits are too short while another test file keeps the cores busy.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    # At the low priority of Ray's workers, engines would not start before other tests are done.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would kill actors while other tests need most of the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Without, Ray sets it to "token", and goes by that in this process after the variable is unset.
    "RAY_AUTH_MODE": "disabled",
}
"""Environment of a Ray session in tests."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def runtime_env() -> dict[str, str]:
    """Of a Ray session with such workers, after the process that forks has imported all."""
    name = f"sparrow-workers-{os.getpid()}"
    _hand_over(name, b"")
    return {"py_executable": f"{sys.executable} -I -S {__file__} {name}"}


@cache
def start_forking() -> None:
    """Start the process that forks. A conftest.py calls it before tests import Ray, which reads its
    environment when it is imported, and which workers therefore import themselves."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0sparrow-workers-{os.getpid()}")
        listener.listen()
        if not os.fork():
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # What a dead worker leaves stays a descendant of the tests.
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                while True:
                    _fork(*listener.accept())
            finally:
                os._exit(0)


def _hand_over(name: str, message: bytes, files: Sequence[int] = ()) -> None:
    """Send a message, and wait until all that it starts have ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        sent = socket.send_fds(connection, [message], files) if message else 0
        connection.sendall(message[sent:])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def _fork(connection: socket.socket, _: object) -> None:
    from engines import import_for_fork

    import_for_fork()
    # Children are gone when they end, without a wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not os.fork():
        try:
            _run(connection)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    connection.close()


def _run(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, *_ = socket.recv_fds(connection, 2**20, 3)
    while part := connection.recv(2**20):
        message += part
    if message:
        sys.argv, environment, folder = json.loads(message)
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    given = [sys.argv[2:], dict(os.environ), os.getcwd()]
    _hand_over(sys.argv[1], json.dumps(given).encode(), range(3))
