"""Restrictions of a process and all that it starts, enforced by the kernel.

A seccomp filter denies memory that no limit counts, and calls that honest programs do not need.
Without a container, it also denies calls that would reach other processes, and Landlock keeps the
program to its folder. Uses only the standard library; x86_64 and aarch64.
"""

import ctypes
import os
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
SECCOMP_MODE_FILTER = 2
AF_UNIX, SOCK_STREAM, SOCK_FLAGS = 1, 1, 0o2000000 | 0o4000
EPERM, ENOSYS = 1, 38

# Numbers of x86_64 and aarch64 from the kernel's syscall tables; None where there is no such call.
Numbers = tuple[int | None, int | None]
SOCKET, SOCKETPAIR, PRLIMIT64 = (41, 198), (53, 199), (302, 261)
MMAP, CLONE, CLONE3, FCNTL, IOCTL = (9, 222), (56, 220), (435, 435), (72, 25), (16, 29)
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
# All CLONE_NEW* flags except CLONE_NEWTIME, which clone does not take.
CLONE_NAMESPACES = 0x7E020000
# F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP: whom a descriptor signals, and how.
OWNER_FCNTLS, OWNER_IOCTLS = (8, 10, 15), (0x8901, 0x8902)

DENIED: dict[str, Numbers] = {
    # Memory that no limit counts, or that outlives the process.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # Parts of the kernel that no honest program needs, and that had many security bugs.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "bpf": (321, 280),
    "perf_event_open": (298, 241), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "fanotify_init": (300, 262),
}  # fmt: skip
DENIED_WITHOUT_CONTAINER: dict[str, Numbers] = {
    # Signals and memory of other processes, which may belong to the same user.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpriority": (141, 140),
    # Sending descriptors through a socket: in transit they are invisible, and hold unlinked files.
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
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

# Instructions of classic BPF: load a word, jumps by equality, by size and by bits, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_Instruction = tuple[int, int, int, int]

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
    # Not /dev/zero: mapped as shared, it is memory that no limit counts.
    rules += [(device, look) for device in ("/dev/random", "/dev/urandom")]
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


def system_call_filter(machine: str, contained: bool) -> bytes:
    """A seccomp program: network sockets kill, denied calls fail with EPERM, all else is allowed.

    Local sockets fail with EPERM too, because libc tries one when it looks up a user's name. Shared
    anonymous memory is refused, as it stays after it is unmapped in part, and no limit counts it.
    `contained` leaves out checks that are needed only without namespaces around the program.
    """
    column, architecture = ARCHITECTURES[machine]
    fail = _FAIL | EPERM
    denied = DENIED if contained else DENIED | DENIED_WITHOUT_CONTAINER
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_GIVE, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        # Numbers from here on belong to the x32 calling convention, which nothing here uses.
        (_AT_LEAST, 0, 1, 0x40000000),
        (_GIVE, 0, 0, _KILL),
    ]
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, fail)]
    # The arguments of clone3 are in memory, where no filter sees them; on ENOSYS libc uses clone.
    program += [(_EQUAL, 0, 1, CLONE3[column]), (_GIVE, 0, 0, _FAIL | ENOSYS)]
    program += _on_argument(
        CLONE[column], 0, [(_ANY_BIT, 0, 1, CLONE_NAMESPACES), (_GIVE, 0, 0, fail)]
    )
    program += _on_argument(
        MMAP[column],
        3,
        [(_ANY_BIT, 0, 2, MAP_ANONYMOUS), (_ANY_BIT, 0, 1, MAP_SHARED), (_GIVE, 0, 0, fail)],
    )
    # Process id 0 is the caller, which may lower its own limits; other processes are denied.
    program += _on_argument(PRLIMIT64[column], 0, [(_EQUAL, 1, 0, 0), (_GIVE, 0, 0, fail)])
    program += _on_argument(
        SOCKET[column], 0, [(_EQUAL, 1, 0, AF_UNIX), (_GIVE, 0, 0, _KILL), (_GIVE, 0, 0, fail)]
    )
    if not contained:
        # Sockets of any other type could send to the sockets of other programs.
        kind = (_AND, 0, 0, 0xFFFFFFFF & ~SOCK_FLAGS)
        program += _on_argument(
            SOCKETPAIR[column], 1, [kind, (_EQUAL, 1, 0, SOCK_STREAM), (_GIVE, 0, 0, fail)]
        )
        for call, commands in ((FCNTL, OWNER_FCNTLS), (IOCTL, OWNER_IOCTLS)):
            checks = [((_EQUAL, 0, 1, command), (_GIVE, 0, 0, fail)) for command in commands]
            program += _on_argument(call[column], 1, [step for pair in checks for step in pair])
    program.append((_GIVE, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def install_filter(program: bytes) -> None:
    """Hand `program` to the kernel; it holds for this process and all that it starts."""
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    result = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)
    _checked("seccomp", result)


def _on_argument(call: int, argument: int, checks: list[_Instruction]) -> list[_Instruction]:
    """`checks` on the low half of an argument of `call`; it is allowed if no check returns."""
    body = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *checks, (_GIVE, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), call), *body]


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
