"""Progress on a terminal, in a file, and beside an engine that kills all processes of ours."""

import os
import pty
import re
import subprocess
import sys
import termios
import time

import pytest

from sparrow_sglang.progress import Progress

# `sglang.Engine` sets the start method when it starts, and kills all children when it shuts down.
CODE = """
import multiprocessing
import psutil
from sparrow_sglang.progress import Progress

multiprocessing.set_start_method("spawn")
progress = Progress(1, "step")
for child in psutil.Process().children(recursive=True):
    child.kill()
    child.wait()
progress.close()
"""
STEP = """
from sparrow_sglang.progress import Progress

progress = Progress(2, "step")
progress.show("rollout 1/2 responses")
progress.say("step 1/2, reward 0.5")
progress.advance()
progress.close()
"""


def test_the_process_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_file_gets_a_dated_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(2, "step")
    progress.where = "step 1/2 "
    finished = progress.counter("rollout", 16, "responses")
    finished()
    progress.say("step 1/2, reward 0.5")
    now += 61
    finished(15)
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == "step 1/2, reward 0.5\n"
    first, last = captured.err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 1/2 rollout 0/16 responses", first)
    assert last.endswith(" step 1/2 rollout 16/16 responses")


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    done = subprocess.run(
        [sys.executable, "-c", STEP], stdout=subprocess.PIPE, stderr=theirs, timeout=60
    )
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert done.stdout.endswith(b"step 1/2, reward 0.5\n")
    assert "50%" in shown and "1/2" in shown and "rollout 1/2 responses" in shown
