"""Messages of libraries that our commands leave out at a start, and those that they keep."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from sparrow_sglang.noise import VARIABLE

CODE = """
import logging
from sparrow_sglang import noise

noise.leave_out_if_asked()
logging.basicConfig(format="%(message)s", level="INFO")
engine = logging.getLogger("sglang.srt.entrypoints.engine")
engine.info("server_args=ServerArgs(model_path='m')")
engine.info("the weights are broken")
"""


@pytest.mark.parametrize("asked", [True, False])
def test_only_known_messages_are_left_out_and_only_where_asked(asked: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    command = [sys.executable, "-c", CODE]
    if asked:
        environment[VARIABLE] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0
    assert "the weights are broken" in done.stderr
    assert ("server_args=ServerArgs" in done.stderr) != asked


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


def test_the_helper_that_tracks_semaphores_is_told_too() -> None:
    code = (
        "import os; os.environ['PYTHONWARNINGS'] = 'error::BytesWarning'\n"
        "from sparrow_sglang import noise; noise.leave_out(); noise.leave_out()\n"
        "print(os.environ['PYTHONWARNINGS'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "error::BytesWarning,ignore:resource_tracker:UserWarning\n"
