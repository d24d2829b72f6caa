"""What untrusted code cannot do in a container, and what a server of SandboxFusion answers."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sandbox_server import sandbox_server
from waiting import wait_until

from sparrow_sglang.rl.sandbox.bubblewrap import FIRST_UID, NUM_UIDS
from sparrow_sglang.rl.sandbox.run import (
    BUBBLEWRAP,
    Limits,
    SandboxError,
    run_inputs,
    run_python,
    sandbox_problem,
)
from sparrow_sglang.rl.tasks.code import reward
from sparrow_sglang.rl.types import Prompt

PROBLEM = sandbox_problem(BUBBLEWRAP)
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=f"no sandbox: {PROBLEM}")

PATIENT = Limits(wall_clock_s=20.0)
ANSWER = "\nprint('right')\n"


def reward_of(source: str, seconds: float = 20.0, memory: int = 1 << 30) -> float:
    """The reward of a program that should print "right"."""
    limits = {"wall_clock_s": seconds, "memory_bytes": memory}
    payload = {"tests": [{"input": "", "output": "right"}], "limits": limits, "sandbox": BUBBLEWRAP}
    return reward(Prompt("p", "code", (1,), payload), f"```python\n{source}\n```")["score"]


def programs() -> list[psutil.Process]:
    """Processes of sandboxed programs that are left."""
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if "/harness.py" in " ".join(one.info["cmdline"] or ())]


def test_an_honest_program_passes() -> None:
    result = run_python("a, b = map(int, input().split())\nprint(a + b)", "2 3\n", PATIENT)
    assert (result.returncode, result.stdout) == (0, "5\n"), result
    assert reward_of(ANSWER) == 1.0


def test_forking_without_end_scores_zero_and_leaves_nobody() -> None:
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
    # The kernel may take a moment to end killed ones.
    wait_until(lambda: not programs(), 10)


def test_inputs_share_a_container_and_nothing_else() -> None:
    source = """
import os, time
def processes(): return sum(one.isdigit() for one in os.listdir('/proc'))
# Those that have been killed may take a moment to end.
end = time.monotonic() + 5
while processes() > 3 and time.monotonic() < end: time.sleep(0.01)
print(input(), os.listdir(), processes())
open('left', 'w').write('x'); os.makedirs('deep/er')
if os.fork() == 0: os.setsid(); time.sleep(60)
"""
    # bubblewrap's own, the harness and the program.
    results = run_inputs(source, ["1", "2", "3"], PATIENT)
    assert [one.stdout for one in results] == [f"{number} [] 3\n" for number in (1, 2, 3)]
    wait_until(lambda: not programs(), 10)


@pytest.mark.parametrize(("signal", "late"), [("SIGKILL", False), ("SIGSTOP", True)])
def test_a_program_that_ends_its_container_fails(signal: str, late: bool) -> None:
    source = f"import os, signal\nif input(): os.kill(os.getppid(), signal.{signal})"
    results = run_inputs(source, ["\n", "1\n", "\n"], Limits(wall_clock_s=2.0))
    assert [one.succeeded for one in results] == [True, False] and results[1].late == late


def test_filling_memory_scores_zero() -> None:
    source = f"x = bytearray(b'1') * {1 << 30}\n"
    assert reward_of(source + ANSWER, memory=256 << 20) == 0.0
    assert "MemoryError" in run_python(source, "", Limits(memory_bytes=256 << 20)).stderr


def test_writing_outside_the_folder_fails() -> None:
    # Pytest's own folders are private, so one that every user could write to lies beside them.
    open_to_all = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    open_to_all.chmod(0o777)
    mine = open_to_all / "mine"
    mine.write_text("kept")
    mine.chmod(0o666)
    targets = [
        *(str(open_to_all / "new"), str(mine), str(Path.home() / "sparrow-evil"), "/sparrow-evil"),
        *("/var/tmp/sparrow-evil", "/dev/sparrow-evil", "/usr/sparrow-evil"),
    ]
    for target in targets:
        assert reward_of(f"open({target!r}, 'w').write('x')" + ANSWER) == 0.0, target
    assert reward_of(f"import os; os.remove({str(mine)!r})" + ANSWER) == 0.0
    assert reward_of(f"import os; os.chmod({str(mine)!r}, 0o600)" + ANSWER) == 0.0
    assert mine.read_text() == "kept" and sorted(os.listdir(open_to_all)) == ["mine"]
    assert mine.stat().st_mode & 0o777 == 0o666
    assert not any(os.path.exists(target) for target in targets if target != str(mine))
    for inside in ("inside", "/tmp/inside", "/dev/shm/inside"):
        assert reward_of(f"open({inside!r}, 'w').write('x')" + ANSWER) == 1.0
        assert not os.path.exists(f"/tmp/{inside}") and not os.path.exists(inside)
    shutil.rmtree(open_to_all)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_no_network_is_in_reach(family: str) -> None:
    kind = socket.AddressFamily[family]
    host = "127.0.0.1" if kind == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=kind) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        source = f"import socket; socket.create_connection(({host!r}, {port}), 2)"
        assert reward_of(source + ANSWER) == 0.0
        with pytest.raises(TimeoutError):
            listener.accept()


def test_printing_a_gigabyte_scores_zero_and_is_not_kept() -> None:
    source = "for _ in range(1024): print('x' * (1 << 20))"
    result = run_python(source, "", PATIENT)
    assert not result.succeeded and len(result.stdout) <= Limits().disk_bytes
    assert reward_of(ANSWER + source) == 0.0


def test_running_for_ever_is_stopped() -> None:
    before = time.monotonic()
    result = run_python("while True: pass", "", Limits(wall_clock_s=0.5))
    assert result.late and time.monotonic() - before < 60


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    """A process outside, of the same user as the program."""
    uid = FIRST_UID + os.getpid() % NUM_UIDS if os.getuid() == 0 else None
    process = subprocess.Popen(["sleep", "60"], user=uid)
    yield process
    process.kill()
    process.wait()


def test_other_processes_are_out_of_reach(bystander: "subprocess.Popen[bytes]") -> None:
    for pid in (bystander.pid, os.getpid(), -1):
        assert reward_of(f"import os; os.kill({pid}, 9)" + ANSWER) == 0.0
    assert bystander.poll() is None


DEEP = """
import os
try:
    for depth in range(900):
        os.mkdir('d' * 200)
        os.chdir('d' * 200)
        if depth % 6 == 0: open('file', 'wb').write(b'x' * 1_000_000)
except OSError: print('full')
"""
UNLINKED = """
import os
held = []
try:
    for number in range(15):
        held.append(open('file', 'wb'))
        held[-1].write(b'x' * 10_000_000)
        held[-1].flush()
        os.remove('file')
except OSError: print('full')
"""


@pytest.mark.parametrize("source", [DEEP, UNLINKED])
def test_no_file_hides_from_the_limit(source: str) -> None:
    assert run_python(source, "", PATIENT).stdout == "full\n"


def test_sockets_outside_are_out_of_reach() -> None:
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
for address in {addresses!r}:
    try: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', address)
    except OSError: pass
"""
    assert reward_of(source + ANSWER) == 1.0
    for listener in listeners:
        with pytest.raises(BlockingIOError):
            listener.recv(1)
        listener.close()
    shutil.rmtree(folder)


def test_no_namespace_can_be_made_with_new_rights() -> None:
    # CLONE_NEWNS | CLONE_NEWNET, then a mount over the system.
    source = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x40020000), libc.mount(b'none', b'/usr', b'tmpfs', 0, None))"
    )
    assert run_python(source, "", PATIENT).stdout == "-1 -1\n"


def test_a_server_of_sandbox_fusion_runs_programs() -> None:
    with sandbox_server(refusals=1) as (url, requests):
        assert sandbox_problem(url) is None
        result = run_python("print(2 * int(input()))", "21", PATIENT, f"{url}/run_code/")
        assert (result.succeeded, result.stdout) == (True, "42\n")
        assert requests[-1]["memory_limit_MB"] == 1024 and requests[-1]["run_timeout"] == 20
        assert run_python("import sys; sys.exit(3)", "", PATIENT, url).returncode == 3
        late = run_python("while True: pass", "", Limits(wall_clock_s=0.5), url)
        assert late.late
        with pytest.raises(SandboxError, match="no result of the program: no runner left"):
            run_python("broken", "", PATIENT, url)
        with pytest.raises(SandboxError, match="/wrong/run_code: status 404"):
            run_python("", "", PATIENT, f"{url}/wrong")
    assert "refused" in str(sandbox_problem(url))
