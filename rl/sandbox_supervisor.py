"""Runs one untrusted command under limits and leaves no process of it behind; a program of its own.

In: a JSON object as the only argument, see `Order`. Out: one JSON object on stdout, see `main`.
`sparrow_sglang.rl.sandbox` starts it, so that whatever happens to the judge, somebody cleans up.
"""

import json
import os
import platform
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sparrow_sglang.rl.confine import install_filter, libc, restrict_files, system_call_filter

POLL_S = 0.02
FILTER_FD = "FILTER_FD"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Order:
    """What to run, and how far it may go.

    `contained` says that `command` is a container program that cuts the file system off by itself;
    it loads the system call filter from the descriptor that replaces the word `FILTER_FD`. `uid` is
    the user to become, None to stay. `readable` are folders for Landlock.
    """

    command: list[str]
    environment: dict[str, str]
    box: str
    stdin: str
    contained: bool
    landlock: bool
    uid: int | None
    readable: list[str]
    wall_clock_s: float
    cpu_s: int
    memory_bytes: int
    processes: int
    output_bytes: int
    disk_bytes: int


def main() -> None:
    """Run the order; print {"limit": name or None, "returncode", "stdout", "stderr"}."""
    order = Order(**json.loads(sys.argv[1]))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = start(order)

    def stop(signum: int, frame: FrameType | None) -> None:
        kill_descendants(process)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    outputs = {"stdout": bytearray(), "stderr": bytearray()}
    try:
        limit = watch(process, order, outputs)
    finally:
        kill_descendants(process)
    texts = {
        name: output[: order.output_bytes].decode("utf-8", "replace")
        for name, output in outputs.items()
    }
    print(json.dumps({"limit": limit, "returncode": process.wait()} | texts))


def start(order: Order) -> "subprocess.Popen[bytes]":
    """The command as a new session, limited before its first instruction."""
    filter_bytes = system_call_filter(platform.machine())
    reading, writing = os.pipe()
    os.write(writing, filter_bytes)
    os.close(writing)
    command = [str(reading) if word == FILTER_FD else word for word in order.command]

    def confine() -> None:
        set_limits(order)
        if order.uid is not None:
            os.setgroups([])
            os.setgid(order.uid)
            os.setuid(order.uid)
        # Changing the user clears it, so this comes after.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if not order.contained:
            if order.landlock:
                restrict_files(order.box, order.readable)
            install_filter(filter_bytes)

    with open(order.stdin, "rb") as stdin:
        process = subprocess.Popen(
            command, env=order.environment, cwd=order.box, stdin=stdin,
            pass_fds=(reading,) if order.contained else (),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=confine,
        )  # fmt: skip
    os.close(reading)
    return process


def set_limits(order: Order) -> None:
    """Limits of the kernel, per process; that on the number of processes is per user.

    A container has user ids of its own, in which the command counts itself.
    """
    limits = {
        resource.RLIMIT_AS: order.memory_bytes,
        resource.RLIMIT_CPU: order.cpu_s,
        resource.RLIMIT_FSIZE: order.disk_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if not order.contained:
        running = _tasks_of(os.getuid()) if order.uid is None else 0
        limits[resource.RLIMIT_NPROC] = running + order.processes
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def watch(
    process: "subprocess.Popen[bytes]", order: Order, outputs: dict[str, bytearray]
) -> str | None:
    """Collect output until the command ends; the name of the limit that it went over, or None.

    These are the limits that the kernel does not keep for a whole tree of processes.
    """
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
    deadline = time.monotonic() + order.wall_clock_s
    next_look = 0.0
    while True:
        ended = process.poll() is not None
        ready, _, _ = select.select(list(pipes), [], [], 0 if ended else POLL_S)
        if ended and not ready:
            return None
        for pipe in ready:
            chunk = os.read(pipe, 1 << 16)
            output = outputs[pipes[pipe]]
            output += chunk
            if len(output) > order.output_bytes:
                return "output"
            if not chunk:
                del pipes[pipe]
        now = time.monotonic()
        if now > deadline:
            return "wall_clock"
        if now > next_look:
            next_look = now + POLL_S
            reap(process)
            if sum(map(_resident_bytes, descendants())) > order.memory_bytes:
                return "memory"
            if _folder_bytes(order.box) > order.disk_bytes:
                return "disk"


def descendants() -> list[int]:
    """Process ids of everything below this process."""
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        parent = queue.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                text = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                children = [int(pid) for pid in text.split()]
                found += children
                queue += children
        except OSError:
            continue
    return found


def kill_descendants(process: "subprocess.Popen[bytes]") -> None:
    """Stop them all first: a stopped process keeps its place, so that no sibling can fork again."""
    stopped: set[int] = set()
    while fresh := set(descendants()) - stopped:
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
    while left := descendants():
        for pid in left:
            _signal(pid, signal.SIGKILL)
        reap(process)
        time.sleep(0.001)


def reap(process: "subprocess.Popen[bytes]") -> None:
    """Collect ended children; orphans of the command become children of this process."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid == process.pid:
            process.wait()
        else:
            os.waitpid(ended.si_pid, 0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _resident_bytes(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def _folder_bytes(folder: str) -> int:
    """Blocks in use, and 4 KiB for each name, so that empty files count too."""
    total = 0
    for parent, _, names in os.walk(folder):
        total += 4096
        for name in names:
            try:
                total += 4096 + os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _tasks_of(uid: int) -> int:
    """Threads of all processes of a user, which is what the kernel counts."""
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue
    return count


if __name__ == "__main__":
    main()
