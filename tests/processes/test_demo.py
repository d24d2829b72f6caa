"""What `make demo` runs: its arithmetic, the demo itself, and that it leaves nothing behind."""

import multiprocessing
import signal
import subprocess
import sys
import time

import psutil
import pytest
from demo_module import DEMO, demo
from engines import import_for_fork


def engine_processes(pid: int, count: int) -> list[psutil.Process]:
    """The processes of the demo's engine, once there are `count`."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if len(children := psutil.Process(pid).children(recursive=True)) >= count:
            return children
        time.sleep(0.1)
    raise AssertionError("the demo did not start its engine")


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    gone, alive = psutil.wait_procs(processes, timeout=30)
    return alive


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_shows_both_answers_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str],
) -> None:
    import_for_fork()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(demo.main(["--no-training", "--tokens", "8"]))
    )
    process.start()
    try:
        engine = engine_processes(process.pid, 2)
        process.join(560)
    finally:
        process.kill()
        process.join()
    out, err = capfd.readouterr()
    assert process.exitcode == 0, err
    assert (
        "sparse answer:" in out and "dense answer:" in out and "generated         8 tokens" in out
    )
    cached, read = (
        int(line.split()[3]) for line in out.splitlines() if line.startswith("KV tokens")
    )
    assert 4000 < cached and read < cached / 2
    assert "where to go next" in out
    assert running(engine) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_demo_stops_its_engine() -> None:
    """A process as the user's, with an engine that is spawned and not forked."""
    process = subprocess.Popen([sys.executable, str(DEMO)], stdout=subprocess.DEVNULL)
    try:
        engine = engine_processes(process.pid, 3)
        process.send_signal(signal.SIGTERM)
        process.wait(240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert running(engine) == []
