"""`sparrow serve` with processes by spawn, as users start it: half a minute, so one test."""

import os
import signal
import sys
from pathlib import Path

from servers import START_S, free_port

from sparrow_sglang.benchmarks.processes import Server, logged_process, until_healthy

# Where the tests run in the background of a shell, Ctrl-C is ignored and would remain so.
COMMAND = """
import signal, sys
from sparrow_sglang.commands import cli

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_ends_all_processes_without_a_traceback(tiny_llama: str, tmp_path: Path) -> None:
    script, log = tmp_path / "sparrow.py", tmp_path / "server.log"
    script.write_text(COMMAND)
    port = free_port()
    command = [sys.executable, str(script), "serve", "--model-path", tiny_llama]
    command += ["--port", str(port), "--skip-tokenizer-init", "--skip-server-warmup"]
    command += ["--sparrow-schedule", "fixed-64", "--max-total-tokens", "8192"]
    with logged_process(command, log) as process:
        server = Server(process, f"http://127.0.0.1:{port}", log)
        for _ in until_healthy([server], 4 * START_S):
            pass
        # As a terminal does, to all processes at once.
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(START_S)
    written = log.read_text()
    assert code == 0 and "Traceback" not in written, written
