"""Runs code that a model has written, so that it can harm nothing but its own result.

In: Python source and what it reads on stdin. Out: a `SandboxResult`. With bubblewrap the program
sees a read-only system, an empty folder of its own, no network and no other process. Without it,
the kernel's own means (another user where we are root, Landlock, seccomp, rlimits) keep it from
writing elsewhere and from the network; `weaknesses` says what is then not kept from it.
"""

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sparrow_sglang.rl.confine import ARCHITECTURES, landlock_version
from sparrow_sglang.rl.sandbox_supervisor import FILTER_FD, Order

logger = logging.getLogger(__name__)

Kind = Literal["bubblewrap", "rlimits"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "rlimits")
# Users without an account, one for each judging process, so that their processes count apart.
FIRST_UID, NUM_UIDS = 50000, 10000
# From version 3 on Landlock covers truncation, without which a file could be emptied.
LANDLOCK_NEEDED = 3
START_UP_S = 20.0
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
PROGRAM = "program.py"


class SandboxError(RuntimeError):
    """Untrusted code cannot be run safely here; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """How far a program may go before it is killed; all but `cpu_s` hold for its whole tree.

    `processes` counts threads too. `memory_bytes` bounds the address space of each process at
    once, and their resident memory together within some 20 ms. `output_bytes` holds for stdout and
    stderr each, `disk_bytes` for its folder.
    """

    wall_clock_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 16
    output_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class SandboxResult:
    """What a program did: `limit` names the limit that it was killed for, None if it was not.

    A `returncode` below 0 is the signal that ended it; it is above 128 with bubblewrap.
    """

    limit: str | None
    returncode: int
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        return self.limit is None and self.returncode == 0


def run_python(
    source: str, stdin: str = "", limits: Limits | None = None, kind: Kind | None = None
) -> SandboxResult:
    """Run `source` with the standard library only; `kind` None takes the strongest one at hand.

    Raises `SandboxError` if no kind, or not this one, can be had on this machine.
    """
    return _run(source, stdin, limits or Limits(), kind or sandbox_kind())


@cache
def sandbox_kind() -> Kind:
    """The strongest sandbox that works here, tried once in each process.

    Warns, in the main process only, if it is the weaker one. Raises `SandboxError` if none works.
    """
    problems: dict[str, str] = {}
    for kind in KINDS:
        problem = sandbox_problem(kind)
        if problem is None:
            if kind == "rlimits" and _in_main_process():
                logger.warning(
                    "WEAKER SANDBOX: bubblewrap cannot be used (%s), so code written by the model"
                    " runs under rlimits, Landlock and seccomp only. Not kept from it: %s. Install"
                    " bubblewrap (apt-get install bubblewrap), or run on a machine that holds"
                    " nothing of value.",
                    problems["bubblewrap"],
                    "; ".join(weaknesses()),
                )
            return kind
        problems[kind] = problem
    raise SandboxError(
        "code written by the model cannot be run safely on this machine: "
        + "; ".join(f"{kind}: {problem}" for kind, problem in problems.items())
        + ". Install bubblewrap (apt-get install bubblewrap) and allow user namespaces, or use a"
        " kernel with Landlock (6.2 or newer)"
    )


def sandbox_problem(kind: Kind) -> str | None:
    """Why `kind` cannot be used here, found out by running a program in it; None if it can."""
    try:
        result = _run("print(input()[::-1])", "abc", Limits(wall_clock_s=START_UP_S), kind)
    except (SandboxError, OSError) as error:
        return str(error)
    if result.stdout == "cba\n" and result.succeeded:
        return None
    return f"a trial run failed ({result.limit or result.stderr.strip() or result.returncode})"


def weaknesses() -> list[str]:
    """What the kind "rlimits" does not enforce on this machine, one phrase each."""
    found = ["reading the system's folders and the names of this machine's users"]
    if landlock_version() < LANDLOCK_NEEDED:
        found = [
            f"reading any file that all users may read, and writing in folders such as /tmp where"
            f" all users may (this kernel's Landlock is version {landlock_version()}, needed is"
            f" {LANDLOCK_NEEDED})"
        ]
    if os.getuid() != 0:
        found.append("using up the number of processes that this user may have")
    return [*found, "bugs of the kernel's interface, most of which it may call"]


def _run(source: str, stdin: str, limits: Limits, kind: Kind) -> SandboxResult:
    uid = FIRST_UID + os.getpid() % NUM_UIDS if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="sparrow-sandbox-") as folder:
        box = Path(folder) / "box"
        box.mkdir()
        (box / PROGRAM).write_text(source, encoding="utf-8", errors="replace")
        (Path(folder) / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        if uid is not None:
            os.chmod(folder, 0o711)
            os.chown(box, uid, uid)
        order = _order(box, Path(folder) / "stdin", limits, kind, uid)
        return _supervise(order)


def _supervise(order: Order) -> SandboxResult:
    # Not the caller's folder on the module path, which might hold files of the same names.
    command = [sys.executable, "-P", "-m", "sparrow_sglang.rl.sandbox_supervisor"]
    process = subprocess.Popen(
        [*command, json.dumps(asdict(order))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        report, problem = process.communicate(timeout=order.wall_clock_s + START_UP_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return SandboxResult("wall_clock", -1, "", "")
    if process.returncode:
        last = problem.strip().rpartition("\n")[2]
        raise SandboxError(f"the sandbox could not start the program ({last})")
    return SandboxResult(**json.loads(report))


def _order(box: Path, stdin: Path, limits: Limits, kind: Kind, uid: int | None) -> Order:
    if platform.machine() not in ARCHITECTURES:
        raise SandboxError(
            f"machine {platform.machine()!r} has no system call filter here: expected one of"
            f" {', '.join(ARCHITECTURES)}"
        )
    interpreter, prefix = _interpreter(others_must_reach=uid is not None)
    readable = [*SYSTEM_FOLDERS, prefix]
    landlock = kind == "rlimits" and landlock_version() >= LANDLOCK_NEEDED
    if kind == "rlimits" and not landlock and uid is None:
        raise SandboxError(
            f"Landlock is version {landlock_version()} in this kernel and needed is"
            f" {LANDLOCK_NEEDED} (0 means none), so this user's files could be overwritten"
        )
    # Isolated from variables and user packages; no compiled files, which would fill the folder.
    command = [interpreter, "-I", "-B", str(box / PROGRAM)]
    if kind == "bubblewrap":
        command = [*_bubblewrap(box, readable, limits.processes), *command]
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(box),
        "TMPDIR": str(box),
        "LANG": "C.UTF-8",
        # A thread for each core would take the address space of all of them.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return Order(
        command=command,
        environment=environment,
        box=str(box),
        stdin=str(stdin),
        contained=kind == "bubblewrap",
        landlock=landlock,
        uid=uid,
        readable=readable,
        **asdict(limits),
    )


def _bubblewrap(box: Path, readable: list[str], processes: int) -> list[str]:
    """The command prefix of a container without network, with `box` as its only writable folder."""
    program, prlimit = shutil.which("bwrap"), shutil.which("prlimit")
    if not program or not prlimit:
        raise SandboxError(f"{'bwrap' if not program else 'prlimit'} is not installed")
    command = [program, "--unshare-all", "--unshare-user", "--die-with-parent"]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for path in dict.fromkeys(readable):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    command += ["--bind", str(box), str(box), "--remount-ro", "/", "--chdir", str(box)]
    command += ["--seccomp", FILTER_FD, "--", prlimit, f"--nproc={processes}", "--"]
    return command


@cache
def _interpreter(others_must_reach: bool) -> tuple[str, str]:
    """A Python and its installation folder; as root, one that other users can run."""
    own = (os.path.realpath(sys.executable), sys.base_prefix)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    candidates = [own, *([(os.path.realpath(system), "/usr")] if system else [])]
    for executable, prefix in candidates:
        folders = [path for path in Path(executable).parents if path.exists()]
        if not others_must_reach or all(folder.stat().st_mode & 1 for folder in folders):
            return executable, prefix
    raise SandboxError(
        f"no Python that other users can run: {own[0]} lies in a private folder; install python3"
        f" from the distribution's packages"
    )


def _in_main_process() -> bool:
    import multiprocessing

    return multiprocessing.parent_process() is None
