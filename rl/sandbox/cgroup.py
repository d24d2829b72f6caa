"""A control group (version 2) around one program, if this process may make one.

In: limits. Out: a group that the program enters before its first instruction, or a stand-in that
does nothing. Uses only the standard library; the kernel's cgroup-v2 document describes the files.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = {"memory", "pids"}
# Further processes in the group: the container's and those that set its limits.
CONTAINER_PROCESSES = 4
REMOVE_S = 2.0


class ControlGroup:
    """Limits memory and number of all processes that have entered; none if `folder` is None."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    @contextmanager
    def for_program(
        cls, memory_bytes: int, processes: int, parent: Path | None = None
    ) -> Iterator["ControlGroup"]:
        """A new group below `parent`, by default `usable_parent()`, removed at the end.

        `memory_bytes` counts everything: resident, shared, page tables, files in memory.
        """
        parent = parent or usable_parent()
        folder = _make(parent, memory_bytes, processes) if parent else None
        try:
            yield cls(folder)
        finally:
            if folder is not None:
                _remove(folder)

    def enter(self) -> None:
        """Move the calling process into the group."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text("0")

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory."""
        if self.folder is None:
            return False
        events = (self.folder / "memory.events").read_text().split()
        return events[events.index("oom_kill") + 1] != "0"


def usable_parent(mount: Path = MOUNT) -> Path | None:
    """The nearest group at or above ours that delegates `CONTROLLERS` and that we may write to."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        ours = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    folder = mount / ours.strip("/")
    while folder.is_relative_to(mount):
        with suppress(OSError):
            handed_on = (folder / "cgroup.subtree_control").read_text().split()
            writable = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
            if writable and set(handed_on) >= CONTROLLERS:
                return folder
        folder = folder.parent
    return None


def _make(parent: Path, memory_bytes: int, processes: int) -> Path | None:
    folder = parent / f"sparrow-sandbox-{os.getpid()}"
    limits = {
        "memory.max": memory_bytes,
        "memory.oom.group": 1,
        "pids.max": processes + CONTAINER_PROCESSES,
    }
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(str(value))
        # The file does not exist if the kernel has no swap.
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return folder


def _remove(folder: Path) -> None:
    # Its processes have been killed; the kernel may need a moment to let go of them.
    deadline = time.monotonic() + REMOVE_S
    while time.monotonic() < deadline:
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.01)
