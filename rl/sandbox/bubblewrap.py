"""A bubblewrap container for Python programs: a read-only system, Python with numpy, a small file
system in memory, no network and no other process. One container runs a program on several
inputs."""

import importlib.util
import json
import math
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from sparrow_sglang.errors import InputError

# User ids without an account, one per reward worker, so that their processes count separately.
FIRST_UID, NUM_UIDS = 50000, 10000
# The program's own file system; also at /dev/shm, where the C library keeps semaphores.
BOX = "/tmp"
PROGRAM, HARNESS, PACKAGES = "/program.py", "/harness.py", "/packages"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
# Not all of /dev: a shared mapping of /dev/zero is memory that no limit counts.
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": BOX,
    "TMPDIR": BOX,
    "LANG": "C.UTF-8",
    "PYTHONPATH": PACKAGES,
    # One thread per core would use up the limit on address space.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Deep recursion needs more than the usual 8 MiB; every thread reserves as much address space.
STACK_BYTES = 64 << 20
# Time for a container to start, and for a result beyond the program's own time.
START_UP_S, GRACE_S = 20.0, 5.0
# Characters of inputs that share a container.
MAX_INPUT = 8 << 20
# Runs the program on each input, in a fork of itself, as an interpreter takes long to start. Writes
# a line for each: exit status, None if it was late, stdout and stderr. It knows no expected
# outputs, so there is nothing to steal or to forge. All that a program has left is killed or
# removed before the next input.
_HARNESS = """
import json, os, shutil, signal, sys, time, types
def file(content=b""):
    descriptor = os.memfd_create("stream")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
def content(descriptor):
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as stream:
        return stream.read().decode("utf-8", "replace")
def wait(pid, seconds):
    end, pause = time.monotonic() + seconds, 0.0005
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
def become(streams):
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = sys.__stdin__ = open(0, errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv = [path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    return main
path, inputs, seconds, most = json.load(sys.stdin)
print(flush=True)
main = None
for text in inputs:
    streams = [file(text.encode("utf-8", "replace")), file(), file()]
    pid = os.fork()
    if pid == 0:
        main = become(streams)
        break
    status = wait(pid, seconds)
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.close(streams[0])
    result = json.dumps([status, *map(content, streams[1:])])
    print(result, flush=True)
    most -= len(result)
    if most < 0:
        break
    for entry in os.scandir():
        try:
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.remove(entry)
        except (OSError, RecursionError):
            pass
if main:
    with open(path, "rb") as program:
        exec(compile(program.read(), path, "exec"), vars(main))
"""


class SandboxError(InputError):
    """Untrusted code cannot be run safely; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """`memory_bytes` bounds the address space of each process; `processes` counts threads too;
    `disk_bytes` holds for the program's files together, and for each of stdout and stderr."""

    wall_clock_s: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class SandboxResult:
    """`returncode` is below 0 or above 128 after a signal, None after the wall-clock limit."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def late(self) -> bool:
        return self.returncode is None

    @property
    def succeeded(self) -> bool:
        return self.returncode == 0


def run_contained(
    source: str, inputs: Sequence[str], limits: Limits, seconds: float
) -> list[SandboxResult]:
    """Results of `source` on the first inputs, in one container; at least one, unless `seconds` are
    over before. Fewer if inputs or outputs are large, or the program ends its container. Raises
    `SandboxError` if the container does not start or a tool is missing."""
    deadline = time.monotonic() + seconds
    # The harness holds them in the memory allowed to the program.
    small = sum(size <= MAX_INPUT for size in accumulate(map(len, inputs)))
    inputs = inputs[: max(1, small)]
    request = json.dumps([PROGRAM, inputs, limits.wall_clock_s, limits.disk_bytes])
    files = [_file(text) for text in (source, _HARNESS, request, "")]
    try:
        process = subprocess.Popen(
            [*_container(*files[:2]), *_limited(limits), *_interpreter()[0], HARNESS],
            env=ENVIRONMENT,
            cwd="/",
            stdin=files[2],
            stdout=subprocess.PIPE,
            stderr=files[3],
            pass_fds=files[:2],
            start_new_session=True,
        )
        try:
            results = _results(process, len(inputs), limits.wall_clock_s + GRACE_S, deadline)
            if results is None:
                os.lseek(files[3], 0, os.SEEK_SET)
                reason = " ".join(os.read(files[3], 1000).decode(errors="replace").split())
                raise SandboxError(f"the container does not start: {reason}")
            return results
        finally:
            # The kernel then ends all that the program has started.
            process.kill()
            process.communicate()
    finally:
        for descriptor in files:
            os.close(descriptor)


def _results(
    process: "subprocess.Popen[bytes]", count: int, patience: float, deadline: float
) -> list[SandboxResult] | None:
    """None if the harness has not started."""
    assert process.stdout is not None
    pipe, buffer = process.stdout.fileno(), bytearray()

    def next_line(limit: float) -> bytes | None:
        """Empty at the end of the pipe; None if none arrives in time."""
        until = min(time.monotonic() + limit, deadline)
        while (end := buffer.find(b"\n")) < 0:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            chunk = os.read(pipe, 1 << 20)
            if not chunk:
                return b""
            buffer.extend(chunk)
        line = bytes(buffer[: end + 1])
        del buffer[: end + 1]
        return line

    results: list[SandboxResult] = []
    if not next_line(START_UP_S):
        return None if time.monotonic() < deadline else results
    while len(results) < count:
        line = next_line(patience)
        try:
            if line:
                results.append(SandboxResult(*json.loads(line)))
                continue
        except (ValueError, TypeError):
            line = b""
        ended = line is not None and process.wait(patience) == 0
        if time.monotonic() < deadline and not (ended and results):
            # It has stopped or killed the harness, or written into its output.
            results.append(SandboxResult(None if line is None else -1))
        return results
    return results


def _container(source: int, harness: int) -> list[str]:
    tools = {name: shutil.which(name) for name in ("bwrap", "prlimit", "setpriv")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise SandboxError(f"{missing[0]} is not installed")
    command = [str(tools["bwrap"]), "--die-with-parent", "--new-session", "--proc", "/proc"]
    for space in ("ipc", "pid", "net", "uts", "cgroup-try"):
        command.append(f"--unshare-{space}")
    if os.getuid() == 0:
        # The limit on processes does not hold for root, whatever it is called in a namespace.
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--disable-userns"]
    _, prefix = _interpreter()
    command += _folders("/dev", *reversed([str(path) for path in Path(prefix).parents][:-1]))
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    for name, target in STREAMS.items():
        command += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    for path in dict.fromkeys([*SYSTEM_FOLDERS, prefix]):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    command += _folders(PACKAGES)
    for package in _numpy():
        command += ["--ro-bind", str(package), f"{PACKAGES}/{package.name}"]
    command += ["--size", str(Limits().disk_bytes), "--perms", "1777", "--tmpfs", "/dev/shm"]
    command += ["--symlink", "/dev/shm", BOX]
    for descriptor, path in ((source, PROGRAM), (harness, HARNESS)):
        command += ["--perms", "0444", "--ro-bind-data", str(descriptor), path]
    return [*command, "--remount-ro", "/", "--chdir", BOX, "--"]


def _folders(*paths: str) -> list[str]:
    return [word for path in paths for word in ("--perms", "0755", "--dir", path)]


def _limited(limits: Limits) -> list[str]:
    """The command prefix that drops root's rights and sets limits for each process."""
    command: list[str] = []
    if os.getuid() == 0:
        uid = str(FIRST_UID + os.getpid() % NUM_UIDS)
        command = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]
        command += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    values = {
        "as": limits.memory_bytes,
        "cpu": math.ceil(limits.wall_clock_s) + 1,
        "fsize": limits.disk_bytes,
        # And the harness.
        "nproc": limits.processes + 1,
        "nofile": 64,
        "stack": STACK_BYTES,
        "core": 0,
        "memlock": 0,
    }
    return [*command, "prlimit", *(f"--{name}={value}" for name, value in values.items()), "--"]


@cache
def _interpreter() -> tuple[tuple[str, ...], str]:
    """Python outside its virtual environment, and its folder."""
    # -s leaves out packages of the user; -B writes no compiled files, which would fill the folder.
    return (os.path.realpath(sys.executable), "-s", "-B"), os.path.realpath(sys.base_prefix)


@cache
def _numpy() -> list[Path]:
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    return [path for path in (folder, folder.with_name("numpy.libs")) if path.exists()]


def _file(content: str) -> int:
    descriptor = os.memfd_create("sparrow-sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content.encode("utf-8", "replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
