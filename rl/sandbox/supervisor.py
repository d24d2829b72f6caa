"""A program that runs one untrusted command under limits, and removes all that it leaves behind.

In: a JSON object on stdin, see `Order`. Out: one JSON object on stdout, see `main`. It is a process
of its own, started by `sparrow_sglang.rl.sandbox.run`, so that it cleans up even if the reward
worker is killed.
"""

import fcntl
import json
import os
import platform
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from sparrow_sglang.rl.sandbox.cgroup import ControlGroup
from sparrow_sglang.rl.sandbox.confine import (
    install_filter,
    libc,
    restrict_files,
    system_call_filter,
)
from sparrow_sglang.rl.sandbox.usage import (
    descendants,
    folder_usage,
    resident_bytes,
    tasks_of,
    tmpfs_usage,
)

POLL_S = 0.02
# Placeholders in a command for the descriptors of the filter and of the program's source.
FILTER_FD, PROGRAM_FD = "FILTER_FD", "PROGRAM_FD"
# Folder of the program: in a container a file system of its own, otherwise the prefix of the name
# of a temporary folder.
BOX = "/sparrow-sandbox-box"
PROGRAM = "program.py"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Order:
    """What to run, and how far it may go.

    `contained` says that `command` starts a container, whose own file system holds `BOX`; it loads
    filter and source from the descriptors that replace the words `FILTER_FD` and `PROGRAM_FD`.
    Without a container, a new folder replaces `BOX`. `parent` is the process that waits for the
    answer, `uid` the user to switch to (None for the current one), and `readable` are folders that
    Landlock lets the program read.
    """

    command: list[str]
    environment: dict[str, str]
    source: str
    stdin: str
    parent: int
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
    order = Order(**json.load(sys.stdin))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != order.parent:
        sys.exit(1)
    outputs = {"stdout": bytearray(), "stderr": bytearray()}
    with ControlGroup.for_program(order.memory_bytes, order.processes) as group:
        with folder_of(order) as box:
            process: subprocess.Popen[bytes] | None = None
            try:
                process = start(order, box, group)
                limit = watch(process, order, usage_of(order, box), group, outputs)
            finally:
                kill_descendants(process)
    texts = {
        name: output[: order.output_bytes].decode("utf-8", "replace")
        for name, output in outputs.items()
    }
    print(json.dumps({"limit": limit, "returncode": process.wait()} | texts))


@contextmanager
def folder_of(order: Order) -> Iterator[str]:
    """A new folder for the program, removed afterwards; with a container just its own `BOX`."""
    if order.contained:
        yield BOX
        return
    box = tempfile.mkdtemp(prefix=f"{BOX[1:]}-")
    try:
        with open(f"{box}/{PROGRAM}", "w", encoding="utf-8", errors="replace") as file:
            file.write(order.source)
        if order.uid is not None:
            os.chown(box, order.uid, order.uid)
        yield box
    finally:
        # Not shutil.rmtree, which fails on trees that are deep or not readable.
        for tool in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*tool, "--", box], stdin=subprocess.DEVNULL, capture_output=True)


def start(order: Order, box: str, group: ControlGroup) -> "subprocess.Popen[bytes]":
    """The command as a new session, limited before its first instruction."""
    filter_bytes = system_call_filter(platform.machine(), order.contained)
    descriptors = {
        FILTER_FD: str(sealed(filter_bytes)),
        PROGRAM_FD: str(sealed(order.source.encode("utf-8", "replace"))),
    }
    command = [descriptors.get(word, word).replace(BOX, box) for word in order.command]
    environment = {name: value.replace(BOX, box) for name, value in order.environment.items()}
    limits = limits_of(order)

    def confine() -> None:
        group.enter()
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
        if order.uid is not None:
            os.setgroups([])
            os.setgid(order.uid)
            os.setuid(order.uid)
        # Set after the change of user, which clears the setting.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if not order.contained:
            if order.landlock:
                restrict_files(box, order.readable)
            install_filter(filter_bytes)

    with os.fdopen(sealed(order.stdin.encode("utf-8", "replace")), "rb") as stdin:
        return subprocess.Popen(
            command, env=environment, cwd="/" if order.contained else box, stdin=stdin,
            pass_fds=[int(number) for number in descriptors.values()] if order.contained else [],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=confine,
        )  # fmt: skip


def sealed(content: bytes) -> int:
    """A descriptor of a sealed file in memory with `content`, which nobody can change or extend."""
    descriptor = os.memfd_create("sparrow-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def limits_of(order: Order) -> dict[int, int]:
    """Kernel limits (rlimits) per process; the limit on the number of processes is per user.

    A container has user ids of its own, so there the command sets the limit on processes itself.
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
        running = tasks_of(os.getuid()) if order.uid is None else 0
        limits[resource.RLIMIT_NPROC] = running + order.processes
    return limits


def usage_of(order: Order, box: str) -> Callable[[list[int]], int]:
    """Bytes that the program holds on disk, as a function of its process ids."""
    return tmpfs_usage(box) if order.contained else folder_usage(box, order.disk_bytes)


def watch(
    process: "subprocess.Popen[bytes]",
    order: Order,
    disk_usage: Callable[[list[int]], int],
    group: ControlGroup,
    outputs: dict[str, bytearray],
) -> str | None:
    """Collect output until the command ends; returns the limit that it exceeded, or None.

    Checks the limits that the kernel does not enforce for a whole tree of processes.
    """
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
    deadline = time.monotonic() + order.wall_clock_s
    next_look = 0.0
    while True:
        ended = process.poll() is not None
        ready, _, _ = select.select(list(pipes), [], [], 0 if ended else POLL_S)
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
        done = ended and not ready
        if done or now > next_look:
            next_look = now + POLL_S
            reap(process)
            pids = descendants()
            if group.out_of_memory() or resident_bytes(pids) > order.memory_bytes:
                return "memory"
            if disk_usage(pids) > order.disk_bytes:
                return "disk"
        if done:
            return None


def kill_descendants(process: "subprocess.Popen[bytes] | None") -> None:
    """Kill all descendants, stopping them first, so that none can fork while others are killed."""
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


def reap(process: "subprocess.Popen[bytes] | None") -> None:
    """Collect ended children; orphans of the command become children of this process."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if process is not None and ended.si_pid == process.pid:
            process.wait()
        else:
            os.waitpid(ended.si_pid, 0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    main()
