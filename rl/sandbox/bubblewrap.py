"""A container by bubblewrap, in which a Python program can harm nothing but its own result.

In: source and stdin. Out: a `SandboxResult`. The program sees a read-only system, Python with
numpy, a small file system of its own in memory, no network and no other process.
"""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from sparrow_sglang.rl.sandbox.base import Limits, SandboxError, SandboxResult
from sparrow_sglang.rl.sandbox.cgroup import ControlGroup

# User ids without an account, one per reward worker, so that their processes count separately.
FIRST_UID, NUM_UIDS = 50000, 10000
# The program's own file system; also at /dev/shm, where the C library keeps semaphores.
BOX = "/tmp"
PROGRAM, PACKAGES = "/program.py", "/packages"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
# Not all of /dev: a shared mapping of /dev/zero is memory that only a control group counts.
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


def run_contained(source: str, stdin: str, limits: Limits) -> SandboxResult:
    """Run `source` in a container; raises `SandboxError` if a tool that this needs is missing."""
    output, errors = _file(), _file()
    files = [_file(source), _file(stdin), output, errors]
    try:
        with ControlGroup.for_program(limits.memory_bytes, limits.processes) as group:
            process = subprocess.Popen(
                [*_container(files[0]), *_limited(limits), *_interpreter()[0], PROGRAM],
                env=ENVIRONMENT,
                cwd="/",
                stdin=files[1],
                stdout=output,
                stderr=errors,
                pass_fds=[files[0]],
                start_new_session=True,
                preexec_fn=group.enter,
            )
            limit: Literal["wall_clock", "memory"] | None = None
            try:
                process.wait(limits.wall_clock_s)
            except subprocess.TimeoutExpired:
                limit = "wall_clock"
            finally:
                # The kernel then ends all that the program has started.
                process.kill()
                process.wait()
            if group.out_of_memory():
                limit = "memory"
        return SandboxResult(limit, process.returncode, _content(output), _content(errors))
    finally:
        for descriptor in files:
            os.close(descriptor)


def _container(source: int) -> list[str]:
    """The command prefix of a container without network, whose only writable folder is `BOX`."""
    missing = [name for name in ("bwrap", "prlimit", "setpriv") if not shutil.which(name)]
    if missing:
        raise SandboxError(f"{missing[0]} is not installed")
    command = ["bwrap", "--die-with-parent", "--new-session", "--proc", "/proc"]
    for space in ("ipc", "pid", "net", "uts", "cgroup-try"):
        command.append(f"--unshare-{space}")
    if os.getuid() == 0:
        # The limit on processes does not hold for root, whatever it is called in a namespace.
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--disable-userns"]
    python, prefix = _interpreter()
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
    command += ["--perms", "0444", "--ro-bind-data", str(source), PROGRAM]
    return [*command, "--remount-ro", "/", "--chdir", BOX, "--"]


def _folders(*paths: str) -> list[str]:
    """Arguments for folders that every user may look into."""
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
        "nproc": limits.processes,
        "nofile": 64,
        "stack": STACK_BYTES,
        "core": 0,
        "memlock": 0,
    }
    return [*command, "prlimit", *(f"--{name}={value}" for name, value in values.items()), "--"]


@cache
def _interpreter() -> tuple[tuple[str, ...], str]:
    """The command of the Python that runs this, outside its virtual environment, and its folder."""
    # -s leaves out packages of the user; -B writes no compiled files, which would fill the folder.
    return (os.path.realpath(sys.executable), "-s", "-B"), os.path.realpath(sys.base_prefix)


@cache
def _numpy() -> list[Path]:
    """Folders of numpy and its libraries."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    return [path for path in (folder, folder.with_name("numpy.libs")) if path.exists()]


def _file(content: str = "") -> int:
    """A descriptor of a file in memory, which programs can also open through /dev/stdin."""
    descriptor = os.memfd_create("sparrow-sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content.encode("utf-8", "replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read().decode("utf-8", "replace")
