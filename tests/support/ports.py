"""Ports for the processes of the tests, which run side by side. A port that is only known to be
free may be taken before it is used: by another process, or by the kernel for an outgoing
connection. The ports here are handed out in turn to all processes of this machine, and lie below
the kernel's ephemeral ports."""

import fcntl
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 23000, 32767
_HANDED_OUT = Path(tempfile.gettempdir()) / "sparrow-test-ports"


def free_port() -> int:
    """A port that no process uses, and that is not handed out again before thousands of others."""
    with _HANDED_OUT.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        port = int(file.read() or FIRST - 1)
        while True:
            port = port + 1 if port < LAST else FIRST
            if _is_free(port):
                break
        file.truncate(0)
        file.write(str(port))
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
