"""What `make demo` runs: its arithmetic, the demo itself, and that it leaves nothing behind."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
from demo_module import DEMO, demo

from sparrow_sglang.models import embedded_model
from sparrow_sglang.schedule_names import load_schedule


def test_the_prompt_is_long_enough_to_be_sparse_and_fits_the_model() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    tokens = len(tokenizer(demo.long_prompt()).input_ids)
    schedule = load_schedule("smollm2-135m-0.86", 16)
    assert 4000 < tokens < 8192 - 500
    assert schedule.kv_budget_tokens(tokens) * 3 < tokens


def start_demo(*flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(DEMO), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would the demo.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def engine_processes(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes of the demo's engine, once there are some."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if len(children := psutil.Process(process.pid).children(recursive=True)) > 2:
            return children
        time.sleep(0.1)
    raise AssertionError("the demo did not start its engine")


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    gone, alive = psutil.wait_procs(processes, timeout=30)
    return alive


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_shows_both_answers_and_leaves_nothing_behind() -> None:
    process = start_demo("--no-training", "--tokens", "8")
    try:
        engine = engine_processes(process)
        out, err = process.communicate(timeout=560)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
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
    process = start_demo()
    try:
        engine = engine_processes(process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert running(engine) == []
