"""Messages of libraries that our commands leave out, and Ctrl-C in the processes they start."""

import multiprocessing

import pytest

from sparrow_sglang.noise import VARIABLE

INTERRUPTED = """
import os, signal
from sparrow_sglang import noise

signal.signal(signal.SIGINT, signal.default_int_handler)
noise.leave_out_if_asked()
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("asked", [True, False])
def test_processes_that_a_command_has_started_ignore_ctrl_c(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends them; each would print a traceback."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if asked:
        monkeypatch.setenv(VARIABLE, "1")
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(INTERRUPTED,))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if asked else 1)
