"""A control group around one program, where this process may make one.

In: limits. Out: a group that the program enters before its first instruction, or a stand-in that
does nothing. The kernel's documents cgroup-v1 and cgroup-v2 describe the files.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")
# Further processes in the group: those of the container itself.
CONTAINER_PROCESSES = 4
REMOVE_S = 2.0
_NAME = "sparrow-sandbox-"


class ControlGroup:
    """Limits memory and number of all processes that have entered; none if `folders` is empty.

    `folders` holds one folder for each controller (version 1), or one for both (version 2).
    """

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = folders

    @classmethod
    @contextmanager
    def for_program(
        cls, memory_bytes: int, processes: int, mount: Path = MOUNT
    ) -> Iterator["ControlGroup"]:
        """A new group, removed at the end, if one can be made.

        `memory_bytes` counts everything: resident, shared, page tables, files in memory.
        """
        folders = tuple(parent / f"{_NAME}{os.getpid()}" for parent in usable_parents(mount))
        try:
            yield cls(folders if _make(folders, memory_bytes, processes) else ())
        finally:
            _remove(folders)

    def enter(self) -> None:
        """Move the calling process into the group."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory."""
        for name in ("memory.events", "memory.oom_control"):
            for folder in self.folders:
                with suppress(FileNotFoundError):
                    events = (folder / name).read_text().split()
                    return "oom_kill" in events and events[events.index("oom_kill") + 1] != "0"
        return False


def usable_parents(mount: Path = MOUNT) -> tuple[Path, ...]:
    """Groups of ours below which this process may make groups with the `CONTROLLERS`.

    With version 2 the nearest group at or above ours that hands them on; with version 1 our group
    of each controller. Empty if there are none.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    ours = {names: path.strip("/") for _, names, path in (line.split(":", 2) for line in lines)}
    folder = mount / ours.get("", "")
    while folder.is_relative_to(mount):
        with suppress(OSError):
            handed_on = (folder / "cgroup.subtree_control").read_text().split()
            if _writable(folder) and set(handed_on) >= set(CONTROLLERS):
                return (folder,)
        folder = folder.parent
    folders = tuple(mount / name / ours[name] for name in CONTROLLERS if name in ours)
    usable = len(folders) == len(CONTROLLERS) and all(map(_writable, folders))
    return folders if usable else ()


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _make(folders: tuple[Path, ...], memory_bytes: int, processes: int) -> bool:
    limits = {
        "memory.max": memory_bytes,
        "memory.swap.max": 0,
        "memory.oom.group": 1,
        "memory.limit_in_bytes": memory_bytes,
        "memory.memsw.limit_in_bytes": memory_bytes,
        "pids.max": processes + CONTAINER_PROCESSES,
    }
    try:
        for folder in folders:
            _remove_abandoned(folder.parent)
            folder.mkdir()
            # Each version and controller has some of the files, and none on swap without swap.
            for name, value in limits.items():
                if (folder / name).exists():
                    (folder / name).write_text(str(value))
    except OSError:
        return False
    return bool(folders)


def _remove_abandoned(parent: Path) -> None:
    """Remove groups of processes that were killed before they could remove theirs."""
    for folder in parent.glob(f"{_NAME}*"):
        pid = int(folder.name.removeprefix(_NAME))
        if pid == os.getpid() or not psutil.pid_exists(pid):
            with suppress(OSError):
                folder.rmdir()


def _remove(folders: tuple[Path, ...]) -> None:
    # Its processes have been killed; the kernel may need a moment to let go of them.
    deadline = time.monotonic() + REMOVE_S
    for folder in folders:
        while folder.exists() and time.monotonic() < deadline:
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.001)
