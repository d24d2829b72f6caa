"""What untrusted code cannot do, in both kinds of sandbox."""

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparrow_sglang.rl.sandbox.confine import ARCHITECTURES, CLONE, DENIED
from sparrow_sglang.rl.sandbox.run import (
    FIRST_UID,
    KINDS,
    NUM_UIDS,
    Kind,
    Limits,
    run_python,
    sandbox_problem,
)
from sparrow_sglang.rl.tasks.code import reward
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Group, Prompt, Rollout

PATIENT = Limits(wall_clock_s=20.0)
ANSWER = "\nprint('right')\n"


@pytest.fixture(scope="module", params=KINDS)
def usable(request: pytest.FixtureRequest) -> Kind:
    problem = sandbox_problem(request.param)
    if problem:
        pytest.skip(f"{request.param}: {problem}")
    return request.param


@pytest.fixture
def kind(usable: Kind, monkeypatch: pytest.MonkeyPatch) -> Kind:
    monkeypatch.setitem(SANDBOX, "sandbox", usable)
    return usable


SANDBOX: dict[str, Kind] = {}


def reward_of(source: str, seconds: float = 20.0, memory: int = 1 << 30) -> float:
    """The reward of a program that should print "right"."""
    limits = {"wall_clock_s": seconds, "memory_bytes": memory}
    payload = {"tests": [{"input": "", "output": "right"}], "limits": limits} | SANDBOX
    return reward(Prompt("p", "code", (1,), payload), f"```python\n{source}\n```")


def folders() -> list[Path]:
    """Folders that sandboxed programs have left behind."""
    return list(Path(tempfile.gettempdir()).glob("sparrow-sandbox-*"))


def processes_with(word: str) -> list[str]:
    return [
        entry
        for entry in os.listdir("/proc")
        if entry.isdigit() and word.encode() in _command_line(entry)
    ]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_honest_program_passes(kind: Kind) -> None:
    result = run_python("a, b = map(int, input().split())\nprint(a + b)", "2 3\n", PATIENT, kind)
    assert (result.limit, result.returncode, result.stdout) == (None, 0, "5\n"), result
    assert reward_of(ANSWER) == 1.0


def test_an_exit_status_is_told(kind: Kind) -> None:
    result = run_python("import sys; sys.exit(3)", "", PATIENT, kind)
    assert result.returncode == 3 and not result.succeeded


def test_forking_without_end_scores_zero_and_leaves_nobody(kind: Kind) -> None:
    # Every copy forks on, whatever fails; without a limit this machine would stop.
    bomb = (
        "import os, time\n"
        "mark = 'sparrow-fork-bomb'\n"
        "end = time.monotonic() + 600\n"
        "while time.monotonic() < end:\n"
        "    try: os.fork()\n"
        "    except OSError: pass\n"
    )
    before = time.monotonic()
    assert reward_of(bomb + ANSWER, seconds=1.0) == 0.0
    assert time.monotonic() - before < 120
    assert processes_with("sparrow-sandbox-") == []


def test_a_daemon_does_not_outlive_the_program(kind: Kind) -> None:
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "    os._exit(0)\n"
    )
    assert run_python(source + ANSWER, "", PATIENT, kind).stdout == "right\n"
    assert processes_with("sparrow-sandbox-") == []


@pytest.mark.parametrize("children", [0, 3])
def test_filling_memory_scores_zero(kind: Kind, children: int) -> None:
    # Alone, the program meets its own limit; four processes of 100 MB each meet the common one.
    size = 100 << 20 if children else 1 << 30
    source = (
        "import os, time\n"
        f"for _ in range({children}):\n"
        "    if os.fork() == 0: break\n"
        f"x = bytearray(b'1') * {size}\n"
        "time.sleep(5)\n"
    )
    memory = 256 << 20
    assert reward_of(source + ANSWER, memory=memory) == 0.0
    result = run_python(source, "", Limits(memory_bytes=memory, wall_clock_s=20), kind)
    if children:
        assert result.limit == "memory"
    else:
        assert "MemoryError" in result.stderr


def test_writing_outside_the_folder_fails(kind: Kind) -> None:
    # Pytest's own folders are private, so one that every user could write to lies beside them.
    open_to_all = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    open_to_all.chmod(0o777)
    mine = open_to_all / "mine"
    mine.write_text("kept")
    mine.chmod(0o666)
    targets = [
        *(str(open_to_all / "new"), str(mine), str(Path.home() / "sparrow-evil"), "/sparrow-evil"),
        *(f"{folder}/sparrow-evil" for folder in ("/tmp", "/var/tmp", "/dev/shm")),
    ]
    for target in targets:
        assert reward_of(f"open({target!r}, 'w').write('x')" + ANSWER) == 0.0, target
    assert reward_of(f"import os; os.remove({str(mine)!r})" + ANSWER) == 0.0
    assert reward_of(f"import os; os.chmod({str(mine)!r}, 0o600)" + ANSWER) == 0.0
    assert mine.read_text() == "kept" and sorted(os.listdir(open_to_all)) == ["mine"]
    assert mine.stat().st_mode & 0o777 == 0o666
    assert not any(os.path.exists(target) for target in targets if target != str(mine))
    assert reward_of("open('inside', 'w').write('x')" + ANSWER) == 1.0
    shutil.rmtree(open_to_all)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_opening_a_socket_scores_zero_even_if_the_program_goes_on(kind: Kind, family: str) -> None:
    source = (
        "import socket\n"
        f"try: socket.socket(socket.{family}, socket.SOCK_DGRAM)\n"
        "except BaseException: pass\n"
    )
    assert reward_of(source + ANSWER) == 0.0


def test_printing_a_gigabyte_scores_zero_and_is_not_kept(kind: Kind) -> None:
    source = "for _ in range(1024): print('x' * (1 << 20))"
    result = run_python(source, "", PATIENT, kind)
    assert result.limit == "output" and len(result.stdout) <= Limits().output_bytes
    assert reward_of(ANSWER + source) == 0.0


def test_filling_the_folder_is_stopped(kind: Kind) -> None:
    source = "i = 0\nwhile True:\n    open(str(i), 'w').write('x' * 1000000)\n    i += 1"
    assert run_python(source, "", PATIENT, kind).limit == "disk"


def test_running_for_ever_is_stopped(kind: Kind) -> None:
    before = time.monotonic()
    result = run_python("while True: pass", "", Limits(wall_clock_s=0.5), kind)
    assert result.limit == "wall_clock" and time.monotonic() - before < 60
    # SIGXCPU or SIGKILL at one second of CPU time, well before the clock.
    result = run_python("while True: pass", "", Limits(wall_clock_s=30, cpu_s=1), kind)
    assert result.limit is None and not result.succeeded


def test_other_processes_are_out_of_reach(kind: Kind) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        for pid in (bystander.pid, os.getpid(), -1):
            assert reward_of(f"import os; os.kill({pid}, 9)" + ANSWER) == 0.0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def bystander(kind: Kind) -> Iterator["subprocess.Popen[bytes]"]:
    """A process outside, of the same user as the program."""
    uid = FIRST_UID + os.getpid() % NUM_UIDS if os.getuid() == 0 else None
    process = subprocess.Popen(["sleep", "60"], user=uid)
    yield process
    process.kill()
    process.wait()


def test_descriptors_cannot_signal_other_processes(
    kind: Kind, bystander: "subprocess.Popen[bytes]"
) -> None:
    source = f"""
import fcntl, os, signal, socket, struct, sys, time
reading, writing = os.pipe()
one, other = socket.socketpair()
F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP, PID = 10, 15, 0x8901, 0x8902, {bystander.pid}
def attempt(call, *arguments):
    try: call(*arguments)
    except OSError: pass
for fd in (reading, one.fileno()):
    attempt(fcntl.fcntl, fd, F_SETSIG, signal.SIGKILL)
    attempt(fcntl.fcntl, fd, fcntl.F_SETOWN, PID)
    attempt(fcntl.fcntl, fd, F_SETOWN_EX, struct.pack('ii', 1, PID))
    attempt(fcntl.ioctl, fd, FIOSETOWN, struct.pack('i', PID))
    attempt(fcntl.ioctl, fd, SIOCSPGRP, struct.pack('i', PID))
    attempt(fcntl.fcntl, fd, fcntl.F_SETFL, os.O_ASYNC)
os.write(writing, b'x')
other.send(b'x')
time.sleep(0.1)
"""
    run_python(source, "", PATIENT, kind)
    assert bystander.poll() is None


DEEP = """
import os, time
try:
    for depth in range(900):
        os.mkdir('d' * 200)
        os.chdir('d' * 200)
        if depth % 6 == 0: open('file', 'wb').write(b'x' * 1_000_000)
except OSError: pass
time.sleep(0.2)
"""
UNLINKED = """
import os, time
held = []
try:
    for number in range(15):
        held.append(open('file', 'wb'))
        held[-1].write(b'x' * 10_000_000)
        held[-1].flush()
        os.remove('file')
except OSError: pass
time.sleep(0.2)
"""
MAPPED = """
import mmap, os, time
held = []
try:
    for number in range(15):
        with open('file', 'w+b') as file:
            file.write(b'x' * 10_000_000)
            file.flush()
            held.append(mmap.mmap(file.fileno(), 4096))
        os.remove('file')
except OSError: pass
time.sleep(0.2)
"""
OF_A_THREAD = """
import ctypes, os, threading, time
def hold():
    held = []
    try:
        for number in range(15):
            held.append(os.open('.', os.O_TMPFILE | os.O_RDWR))
            os.write(held[-1], b'x' * 10_000_000)
    except OSError: pass
    time.sleep(0.2)
    print('right', flush=True)
    os._exit(0)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""
EMPTY_FOLDERS = """
import os
try:
    for number in range(1_000_000): os.mkdir(str(number))
except OSError: pass
"""
HIDDEN_FOLDER = """
import os, time
os.mkdir('hidden', 0o300)
try:
    for number in range(15): open(f'hidden/{number}', 'wb').write(b'x' * 10_000_000)
except OSError: pass
time.sleep(0.2)
"""


@pytest.mark.parametrize(
    "source", [DEEP, UNLINKED, MAPPED, OF_A_THREAD, EMPTY_FOLDERS, HIDDEN_FOLDER]
)
def test_no_file_hides_from_the_limit_or_stays(kind: Kind, source: str) -> None:
    result = run_python(source + ANSWER, "", PATIENT, kind)
    assert result.limit == "disk", result
    assert folders() == []


def test_a_pool_that_gives_up_leaves_neither_process_nor_folder(kind: Kind) -> None:
    payload = {
        "tests": [{"input": "", "output": ""}],
        "limits": {"wall_clock_s": 60.0, "memory_bytes": 1 << 30},
        "sandbox": kind,
    }
    text = "```python\nopen('file', 'w').write('x'); import time; time.sleep(60)\n```"
    rollout = Rollout("p", 0, (1,), (2,), np.zeros(1, np.float32), "stop", "0", "dense", text)
    group = Group(Prompt("p", "code", (1,), payload), (rollout,))
    with RewardPool(reward, workers=1, timeout_s=4.0) as pool:
        scores = pool.score([group])
    assert (scores.timeouts, scores.rewards[0].tolist()) == (1, [0.0])
    deadline = time.monotonic() + 60
    while (processes_with("sparrow-sandbox-") or folders()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with("sparrow-sandbox-") == [] and folders() == []


def test_no_memory_stays_uncounted(kind: Kind) -> None:
    # Each kind of memory here keeps its pages when a part is unmapped, or was never mapped.
    source = """
import ctypes, mmap, os
def shared(): mmap.mmap(-1, 1 << 20)
def device(): mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)
def nameless(): os.memfd_create('x')
def stdin(): os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')
def system_v():
    if ctypes.CDLL(None).shmget(0, 1 << 20, 0o600) < 0: raise OSError
for way in (shared, device, nameless, stdin, system_v):
    try: way()
    except OSError: continue
    print(way.__name__)
"""
    result = run_python(source, "input", PATIENT, kind)
    assert result.succeeded and result.stdout == "", result


def test_memory_of_a_process_without_its_first_thread_counts(kind: Kind) -> None:
    source = """
import ctypes, os, threading, time
for _ in range(3):
    if os.fork() == 0: break
def hold():
    time.sleep(0.1)
    x = bytearray(b'1') * (100 << 20)
    time.sleep(10)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    result = run_python(source, "", Limits(memory_bytes=256 << 20, wall_clock_s=20), kind)
    assert result.limit == "memory"


def test_sockets_outside_are_out_of_reach(kind: Kind) -> None:
    folder = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    folder.chmod(0o777)
    addresses = [str(folder / "socket"), f"\0sparrow-{os.getpid()}"]
    listeners = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in addresses]
    for listener, address in zip(listeners, addresses, strict=True):
        listener.bind(address)
        listener.setblocking(False)
    os.chmod(addresses[0], 0o777)
    source = f"""
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
    for address in {addresses!r}:
        for call in ('sendto', 'connect'):
            try:
                one, other = socket.socketpair(socket.AF_UNIX, kind)
                other.close()
                if call == 'sendto': one.sendto(b'x', address)
                else: one.connect(address); one.send(b'x')
            except OSError: pass
"""
    assert reward_of(source + ANSWER) == 1.0
    for listener in listeners:
        with pytest.raises(BlockingIOError):
            listener.recv(1)
        listener.close()
    shutil.rmtree(folder)


def test_event_loops_work(kind: Kind) -> None:
    source = "import asyncio\nasync def main(): print('right')\nasyncio.run(main())"
    assert reward_of(source) == 1.0


@pytest.mark.parametrize(
    "name",
    ["unshare", "userfaultfd", "keyctl", "fsopen", "perf_event_open", "bpf", "io_uring_setup"],
)
def test_calls_that_no_honest_program_needs_are_denied(kind: Kind, name: str) -> None:
    number = DENIED[name][ARCHITECTURES[platform.machine()][0]]
    source = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        # CLONE_NEWUSER, which any user may ask for.
        f"print(libc.syscall({number}, 0x10000000, 0, 0, 0, 0), ctypes.get_errno())\n"
    )
    assert run_python(source, "", PATIENT, kind).stdout == "-1 1\n"


def test_clone_makes_no_namespace(kind: Kind) -> None:
    number = CLONE[ARCHITECTURES[platform.machine()][0]]
    source = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"child = libc.syscall({number}, 0x10000011, 0, 0, 0, 0)\n"
        "if child == 0: os._exit(0)\n"
        "print(child, ctypes.get_errno())\n"
    )
    assert run_python(source, "", PATIENT, kind).stdout == "-1 1\n"
