"""What the kernel itself forbids a process, and all that it starts, from here on.

Landlock keeps it to a folder; a seccomp filter cuts the network and whatever would reach other
processes or outlive this one. In: nothing but arguments. Uses only the standard library; x86_64 and
aarch64.
"""

import ctypes
import os
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
SECCOMP_MODE_FILTER = 2
AF_UNIX = 1

# Numbers of x86_64 and aarch64 from the kernel's syscall tables; None where there is no such call.
SOCKET = (41, 198)
PRLIMIT64 = (302, 261)
DENIED: dict[str, tuple[int | None, int | None]] = {
    # Signals and memory of other processes, which may belong to the same user.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpriority": (141, 140),
    # Memory that no limit counts, or that outlives the process.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217),
    # Sockets by another way.
    "io_uring_setup": (425, 425),
    # Changes of files outside that Landlock does not handle.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
# Access bits in the order of linux/landlock.h; ABI 3 knows the first fifteen, truncation the last.
FS_ALL = (1 << 15) - 1
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR, FS_TRUNCATE = 1, 2, 4, 8, 1 << 14

libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Version of Landlock's interface in the running kernel; 0 without Landlock."""
    version: int = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    return max(version, 0)


def restrict_files(box: str, readable: list[str]) -> None:
    """Landlock: read and execute below `readable`, everything below `box`, nothing elsewhere."""
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    handled = struct.pack("Q", FS_ALL)
    ruleset = _checked("landlock", libc.syscall(LANDLOCK_CREATE_RULESET, handled, len(handled), 0))
    look = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR
    rules = [(box, FS_ALL), *((path, look) for path in readable)]
    rules += [("/dev/null", look | FS_WRITE_FILE | FS_TRUNCATE)]
    rules += [(device, look) for device in ("/dev/zero", "/dev/random", "/dev/urandom")]
    for path, access in rules:
        if not os.path.exists(path):
            continue
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            access &= FS_EXECUTE | FS_READ_FILE | FS_WRITE_FILE | FS_TRUNCATE
        rule = struct.pack("=Qi", access, parent)
        _checked("landlock", libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0))
        os.close(parent)
    _checked("landlock", libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def system_call_filter(machine: str) -> bytes:
    """A seccomp program: network sockets kill, `DENIED` calls fail with EPERM, all else goes on.

    Local sockets fail with EPERM too, because libc tries one when it looks up a user's name.
    """
    column, architecture = ARCHITECTURES[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, deny = 0x80000000, 0x7FFF0000, 0x00050000 | 1
    number_at, architecture_at, argument_at = 0, 4, 16
    program = [
        (load, 0, 0, architecture_at),
        (equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, number_at),
        # Numbers from here on belong to the x32 calling convention, which nothing here uses.
        (at_least, 0, 1, 0x40000000),
        (give, 0, 0, kill),
    ]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [(equal, 0, 1, number), (give, 0, 0, deny)]
    program += [
        # Limits of another process; those of the caller are lowered with process id 0.
        (equal, 0, 4, PRLIMIT64[column]),
        (load, 0, 0, argument_at),
        (equal, 1, 0, 0),
        (give, 0, 0, deny),
        (give, 0, 0, allow),
        (equal, 0, 4, SOCKET[column]),
        (load, 0, 0, argument_at),
        (equal, 1, 0, AF_UNIX),
        (give, 0, 0, kill),
        (give, 0, 0, deny),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def install_filter(program: bytes) -> None:
    """Hand `program` to the kernel; it holds for this process and all that it starts."""
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    result = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)
    _checked("seccomp", result)


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
