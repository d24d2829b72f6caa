"""Runs code that a model has written, so that it can harm nothing but its own result.

In: Python source and its stdin. Out: a `SandboxResult`. In the kind "bubblewrap" the program sees a
read-only system, a small file system of its own in memory, no network and no other process. "weak"
uses only what the kernel offers without namespaces (another user if we are root, Landlock, seccomp,
rlimits); `weaknesses` lists what the program can then still do.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.rl.sandbox.cgroup import usable_parent
from sparrow_sglang.rl.sandbox.confine import ARCHITECTURES, landlock_version
from sparrow_sglang.rl.sandbox.supervisor import BOX, FILTER_FD, PROGRAM, PROGRAM_FD, Order

Kind = Literal["bubblewrap", "weak"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "weak")
# User ids without an account, one per reward worker, so that their processes count separately.
FIRST_UID, NUM_UIDS = 50000, 10000
# Landlock covers truncation from version 3 on; earlier versions would let a program empty files.
LANDLOCK_NEEDED = 3
START_UP_S = 20.0
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
# Not bubblewrap's own /dev, which has /dev/zero: mapped as shared, it is memory no limit counts.
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}

WEAKNESSES = {
    "system files": "reading the system's folders",
    "readable files": "reading any file that all users may read",
    "writable folders": "writing without limit wherever all users may, as in /tmp and /dev/shm",
    "processes": "seeing the command lines of other processes",
    "process count": "using up the number of processes that this user may have",
    "memory": "taking more memory than its limit for some 20 ms, by several processes at once",
    "disk": "taking more disk than its limit for some 20 ms",
    "kernel": "exploiting faults in the kernel's interface, most of which it may call",
}


class SandboxError(SparrowError, RuntimeError):
    """Untrusted code cannot be run safely here; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a program is killed; all but `cpu_s` hold for its whole process tree.

    `processes` counts threads too. `memory_bytes` bounds the address space of each process
    immediately, and the resident memory of all together: immediately in a control group, otherwise
    within some 20 ms. `output_bytes` holds for stdout and stderr each, `disk_bytes` for its folder.
    """

    wall_clock_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 16
    output_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class SandboxResult:
    """The outcome of a program: `limit` names the limit it was killed for, None if it was not.

    If a signal ended the program, `returncode` is below 0, or above 128 with bubblewrap.
    """

    limit: str | None
    returncode: int
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        return self.limit is None and self.returncode == 0


def run_python(
    source: str, stdin: str = "", limits: Limits | None = None, kind: Kind = "bubblewrap"
) -> SandboxResult:
    """Run `source` with the standard library only.

    Raises `SandboxError` if this kind does not work on this machine.
    """
    order = _order(source, stdin, limits or Limits(), kind)
    # -P keeps the caller's folder off the module path, as it might hold files of the same names.
    command = [sys.executable, "-P", "-m", "sparrow_sglang.rl.sandbox.supervisor"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        report, problem = process.communicate(
            json.dumps(asdict(order)), timeout=order.wall_clock_s + START_UP_S
        )
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return SandboxResult("wall_clock", -1, "", "")
    if process.returncode:
        last = problem.strip().rpartition("\n")[2]
        raise SandboxError(f"the sandbox could not start the program ({last})")
    return SandboxResult(**json.loads(report))


def check_sandbox(kind: Kind) -> None:
    """Raises `SandboxError`, one line with the remedy, unless `kind` works on this machine."""
    problem = sandbox_problem(kind)
    if problem is None:
        return
    if kind == "weak":
        raise SandboxError(f"code written by the model cannot be run here: {problem}")
    raise SandboxError(
        f"code written by the model needs bubblewrap, which does not work here: {problem}; run"
        ' "apt-get install -y bubblewrap" (0.7 or newer) and allow user namespaces, or set'
        f' sandbox = "weak", which does not keep programs from: {"; ".join(weaknesses())}'
    )


def sandbox_problem(kind: Kind) -> str | None:
    """Why `kind` does not work here, by a trial run of a program; None if it works."""
    try:
        limits = Limits(wall_clock_s=START_UP_S, cpu_s=int(START_UP_S))
        result = run_python("print(input()[::-1])", "abc", limits, kind)
    except (SandboxError, OSError) as error:
        return str(error)
    if result.stdout == "cba\n" and result.succeeded:
        return None
    reason = result.limit or " ".join(result.stderr.split()) or f"status {result.returncode}"
    return f"a trial run failed ({reason})"


def weaknesses() -> list[str]:
    """What the kind "weak" does not keep from programs on this machine, one phrase each."""
    landlock = landlock_version() >= LANDLOCK_NEEDED
    names = ["system files"] if landlock else ["readable files", "writable folders", "processes"]
    if os.getuid() != 0:
        names.append("process count")
    if usable_parent() is None:
        names.append("memory")
    return [WEAKNESSES[name] for name in [*names, "disk", "kernel"]]


def _order(source: str, stdin: str, limits: Limits, kind: Kind) -> Order:
    if platform.machine() not in ARCHITECTURES:
        raise SandboxError(
            f"machine {platform.machine()!r} has no system call filter here: expected one of"
            f" {', '.join(ARCHITECTURES)}"
        )
    uid = FIRST_UID + os.getpid() % NUM_UIDS if os.getuid() == 0 else None
    interpreter, prefix = _interpreter(others_must_reach=uid is not None)
    readable = [*SYSTEM_FOLDERS, prefix]
    landlock = kind == "weak" and landlock_version() >= LANDLOCK_NEEDED
    if kind == "weak" and not landlock and uid is None:
        raise SandboxError(
            f"Landlock is version {landlock_version()} in this kernel and needed is"
            f" {LANDLOCK_NEEDED} (0 means none), so this user's files could be overwritten"
        )
    # -I ignores environment variables and user packages; -B writes no compiled files, which would
    # fill the folder.
    command = [interpreter, "-I", "-B", f"{BOX}/{PROGRAM}"]
    if kind == "bubblewrap":
        command = [*_bubblewrap(readable, limits), *command]
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": BOX,
        "TMPDIR": BOX,
        "LANG": "C.UTF-8",
        # One thread per core would use up the limit on address space.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return Order(
        command=command,
        environment=environment,
        source=source,
        stdin=stdin,
        parent=os.getpid(),
        contained=kind == "bubblewrap",
        landlock=landlock,
        uid=uid,
        readable=readable,
        **asdict(limits),
    )


def _bubblewrap(readable: list[str], limits: Limits) -> list[str]:
    """The command prefix of a container without network, with `BOX` as its only writable folder."""
    program, prlimit = shutil.which("bwrap"), shutil.which("prlimit")
    if not program or not prlimit:
        raise SandboxError(f"{'bwrap' if not program else 'prlimit'} is not installed")
    command = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    command += ["--proc", "/proc"]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    for name, target in STREAMS.items():
        command += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    for path in dict.fromkeys(readable):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    command += ["--size", str(limits.disk_bytes), "--tmpfs", BOX]
    command += ["--file", PROGRAM_FD, f"{BOX}/{PROGRAM}"]
    command += ["--remount-ro", "/", "--chdir", BOX, "--seccomp", FILTER_FD, "--"]
    return [*command, prlimit, f"--nproc={limits.processes}", "--"]


@cache
def _interpreter(others_must_reach: bool) -> tuple[str, str]:
    """A Python and its installation folder; as root, one that other users can run."""
    ours = (os.path.realpath(sys.executable), sys.base_prefix)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    candidates = [ours, *([(os.path.realpath(system), "/usr")] if system else [])]
    for executable, prefix in candidates:
        folders = [path for path in Path(executable).parents if path.exists()]
        if not others_must_reach or all(folder.stat().st_mode & 1 for folder in folders):
            return executable, prefix
    raise SandboxError(
        f"no Python that other users can run: {ours[0]} lies in a private folder; install python3"
        f" from the distribution's packages"
    )
