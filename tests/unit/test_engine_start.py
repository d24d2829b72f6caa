"""Engines that end while they start."""

import subprocess
import sys

PROGRAM = """
import gc, sys, types
import zmq

class Engine:
    def __init__(self, **arguments):
        self.cycle = self
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        raise SystemExit(143)

sys.modules["sglang"] = types.SimpleNamespace(Engine=Engine)
from sparrow_sglang.client.engine import start_engine
try:
    start_engine({}, print)
except SystemExit:
    pass
gc.collect()
sys.exit(143)
"""


def test_a_command_that_sigterm_ends_meanwhile_does_not_wait_for_sockets() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=20).returncode == 143
