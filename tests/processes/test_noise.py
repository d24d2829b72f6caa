"""Messages of libraries that our commands leave out, and Ctrl-C in the processes they start."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from sparrow_sglang.noise import VARIABLE

CODE = """
import logging, warnings
from sparrow_sglang import noise

noise.leave_out_if_asked()
warnings.warn("Only CUDA supports this")
warnings.warn("the weights are broken")
logging.getLogger("sglang.srt.models.registry").warning("Ignore import error when loading m")
logging.getLogger("sglang.srt.models.registry").warning("the model is unknown")
"""


@pytest.mark.parametrize("asked", [True, False])
def test_only_known_messages_are_left_out_and_only_where_asked(asked: bool) -> None:
    set_here = (VARIABLE, "PYTHONWARNINGS")
    environment = {key: value for key, value in os.environ.items() if key not in set_here}
    command = [sys.executable, "-c", CODE]
    if asked:
        environment[VARIABLE] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert "the weights are broken" in done.stderr and "the model is unknown" in done.stderr
    for message in ("Only CUDA", "Ignore import error"):
        assert (message in done.stderr) != asked


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
