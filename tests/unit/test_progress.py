"""A progress bar beside an engine that kills all children of its process."""

import subprocess
import sys

# What `sglang.Engine` does when it starts, and what when it shuts down.
CODE = """
import multiprocessing
import psutil
from sparrow_sglang.progress import progress_bar

multiprocessing.set_start_method("spawn")
with progress_bar(total=1, disable=True):
    for child in psutil.Process().children(recursive=True):
        child.kill()
        child.wait()
"""


def test_the_process_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
