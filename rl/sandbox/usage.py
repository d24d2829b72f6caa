"""Resource usage of a sandboxed program and all that it has started: processes, memory, disk.

In: the calling process, of which the program is a descendant. Out: process ids and bytes. Uses only
the standard library.
"""

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

# Bytes counted per file name: it takes kernel memory even if its file is empty.
NAME_BYTES = 4096
# In deeper folders a path may exceed the kernel's limit, and its content cannot be counted.
MAX_DEPTH = 32
TOO_MUCH = 1 << 62


def descendants() -> list[int]:
    """Process ids of everything below this process."""
    pids: list[int] = []
    queue = [os.getpid()]
    while queue:
        parent = queue.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                text = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                children = [int(number) for number in text.split()]
                pids += children
                queue += children
        except OSError:
            continue
    return pids


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of these processes; pages that several share count for each of them."""
    pages = 0
    for pid in pids:
        # All threads are read, because a process whose first thread has ended reports no memory.
        pages += max(map(_resident_pages, _threads(pid)), default=0)
    return pages * resource.getpagesize()


def tasks_of(uid: int) -> int:
    """Threads of all processes of a user, which is what the kernel counts."""
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue
    return count


def folder_usage(folder: str, limit: int) -> Callable[[list[int]], int]:
    """A function of process ids that gives the bytes of `folder`, unlinked files included.

    It stops counting above `limit`, and gives `TOO_MUCH` if something cannot be counted: folders
    deeper than `MAX_DEPTH` or without read permission, and unlinked files that are mapped but not
    open.
    """
    device = os.stat(folder).st_dev

    def usage(pids: list[int]) -> int:
        total = _named_bytes(folder, limit)
        return total if total > limit else total + _unlinked_bytes(folder, device, pids)

    return usage


def _named_bytes(folder: str, limit: int) -> int:
    total, queue = 0, [(folder, 0)]
    while queue and total <= limit:
        parent, depth = queue.pop()
        if depth > MAX_DEPTH:
            return TOO_MUCH
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    total += NAME_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        queue.append((entry.path, depth + 1))
                    if total > limit:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return TOO_MUCH
    return total


def _unlinked_bytes(folder: str, device: int, pids: list[int]) -> int:
    sizes: dict[int, int] = {}
    # A thread may have descriptors of its own.
    for thread in [thread for pid in pids for thread in _threads(pid)]:
        try:
            for descriptor in os.listdir(f"{thread}/fd"):
                status = os.stat(f"{thread}/fd/{descriptor}")
                if status.st_dev == device and status.st_nlink == 0:
                    if stat.S_ISREG(status.st_mode):
                        sizes[status.st_ino] = NAME_BYTES + status.st_blocks * 512
            for line in Path(f"{thread}/maps").read_text().splitlines():
                # address, permissions, offset, device, inode, path
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(folder):
                    if fields[5].endswith(" (deleted)") and int(fields[4]) not in sizes:
                        return TOO_MUCH
        except PermissionError:
            # Either the process denies access, which honest programs do not, or it is about to end
            # and holds no memory.
            if _resident_pages(thread):
                return TOO_MUCH
        except OSError:
            continue
    return sum(sizes.values())


def _threads(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _resident_pages(thread: str) -> int:
    try:
        return int(Path(f"{thread}/statm").read_text().split()[1])
    except OSError:
        return 0


def tmpfs_usage(folder: str) -> Callable[[list[int]], int]:
    """A function of process ids that gives the bytes of the file system at `folder` in a container.

    It counts all files there, also unlinked ones, and still works after the last process has ended.
    """
    host = os.stat("/").st_dev
    opened: list[int] = []

    def usage(pids: list[int]) -> int:
        for pid in [] if opened else pids:
            try:
                descriptor = os.open(f"/proc/{pid}/root{folder}", os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            if os.fstat(descriptor).st_dev == host:
                os.close(descriptor)
                continue
            opened.append(descriptor)
            break
        if not opened:
            return 0
        system = os.fstatvfs(opened[0])
        blocks = (system.f_blocks - system.f_bfree) * system.f_frsize
        return blocks + (system.f_files - system.f_ffree) * NAME_BYTES

    return usage
