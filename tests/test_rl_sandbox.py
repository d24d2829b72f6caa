"""What untrusted code cannot do, in both kinds of sandbox."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from sparrow_sglang.rl.sandbox import KINDS, Kind, Limits, run_python, sandbox_problem
from sparrow_sglang.rl.tasks.code import reward
from sparrow_sglang.rl.types import Prompt

PATIENT = Limits(wall_clock_s=20.0)
ANSWER = "\nprint('right')\n"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    problem = sandbox_problem(request.param)
    if problem:
        pytest.skip(f"{request.param}: {problem}")
    monkeypatch.setattr("sparrow_sglang.rl.tasks.code.sandbox_kind", lambda: request.param)
    monkeypatch.setattr("sparrow_sglang.rl.sandbox.sandbox_kind", lambda: request.param)
    return request.param


def judged(source: str, seconds: float = 20.0, memory: int = 1 << 30) -> float:
    """The reward of a program that should print "right"."""
    limits = {"wall_clock_s": seconds, "memory_bytes": memory}
    payload = {"tests": [{"input": "", "output": "right"}], "limits": limits}
    return reward(Prompt("p", "code", (1,), payload), f"```python\n{source}\n```")


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
    assert judged(ANSWER) == 1.0


def test_an_exit_status_is_told(kind: Kind) -> None:
    result = run_python("import sys; sys.exit(3)", "", PATIENT, kind)
    assert result.returncode == 3 and not result.succeeded


def test_forking_without_end_scores_zero_and_leaves_nobody(kind: Kind) -> None:
    # Every copy forks on, whatever fails; without a limit this machine would stop.
    bomb = (
        "import os, time\n"
        "mark = 'sparrow-fork-bomb'\n"
        "end = time.monotonic() + 30\n"
        "while time.monotonic() < end:\n"
        "    try: os.fork()\n"
        "    except OSError: pass\n"
    )
    before = time.monotonic()
    assert judged(bomb + ANSWER, seconds=1.0) == 0.0
    assert time.monotonic() - before < 15
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
    assert judged(source + ANSWER, memory=memory) == 0.0
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
        assert judged(f"open({target!r}, 'w').write('x')" + ANSWER) == 0.0, target
    assert judged(f"import os; os.remove({str(mine)!r})" + ANSWER) == 0.0
    assert judged(f"import os; os.chmod({str(mine)!r}, 0o600)" + ANSWER) == 0.0
    assert mine.read_text() == "kept" and sorted(os.listdir(open_to_all)) == ["mine"]
    assert mine.stat().st_mode & 0o777 == 0o666
    assert not any(os.path.exists(target) for target in targets if target != str(mine))
    assert judged("open('inside', 'w').write('x')" + ANSWER) == 1.0
    shutil.rmtree(open_to_all)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_opening_a_socket_scores_zero_even_if_the_program_goes_on(kind: Kind, family: str) -> None:
    source = (
        "import socket\n"
        f"try: socket.socket(socket.{family}, socket.SOCK_DGRAM)\n"
        "except BaseException: pass\n"
    )
    assert judged(source + ANSWER) == 0.0


def test_printing_a_gigabyte_scores_zero_and_is_not_kept(kind: Kind) -> None:
    source = "for _ in range(1024): print('x' * (1 << 20))"
    result = run_python(source, "", PATIENT, kind)
    assert result.limit == "output" and len(result.stdout) <= Limits().output_bytes
    assert judged(ANSWER + source) == 0.0


def test_filling_the_folder_is_stopped(kind: Kind) -> None:
    source = "i = 0\nwhile True:\n    open(str(i), 'w').write('x' * 1000000)\n    i += 1"
    assert run_python(source, "", PATIENT, kind).limit == "disk"


def test_running_for_ever_is_stopped(kind: Kind) -> None:
    before = time.monotonic()
    result = run_python("while True: pass", "", Limits(wall_clock_s=0.5), kind)
    assert result.limit == "wall_clock" and time.monotonic() - before < 10
    # SIGXCPU or SIGKILL at one second of CPU time, well before the clock.
    result = run_python("while True: pass", "", Limits(wall_clock_s=30, cpu_s=1), kind)
    assert result.limit is None and not result.succeeded


def test_other_processes_are_out_of_reach(kind: Kind) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        for pid in (bystander.pid, os.getpid(), -1):
            assert judged(f"import os; os.kill({pid}, 9)" + ANSWER) == 0.0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
