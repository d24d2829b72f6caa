"""What `make demo` runs: its arithmetic, the demo itself, and that it leaves nothing behind."""

import os
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


def group_members(group: int) -> list[int]:
    """Processes of a process group, except zombies."""
    return [
        process.pid
        for process in psutil.process_iter(["pid", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE and _group(process.pid) == group
    ]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def start_demo(*flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(DEMO), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would the demo.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def server_group(process: "subprocess.Popen[str]") -> int:
    """The process group of the demo's server, once it runs."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for child in psutil.Process(process.pid).children():
            if _group(child.pid) == child.pid:
                return child.pid
        time.sleep(0.1)
    raise AssertionError("the demo did not start its server")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_demo_stops_its_server(signum: signal.Signals) -> None:
    process = start_demo()
    try:
        group = server_group(process)
        time.sleep(3)
        process.send_signal(signum)
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[signum]
    assert group_members(group) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_shows_both_answers_and_leaves_nothing_behind() -> None:
    process = start_demo("--no-training", "--tokens", "8")
    try:
        group = server_group(process)
        out, err = process.communicate(timeout=560)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert process.returncode == 0, err
    assert (
        "sparse answer:" in out and "dense answer:" in out and "generated         8 tokens" in out
    )
    cached, read = (
        int(line.split()[3]) for line in out.splitlines() if line.startswith("KV tokens")
    )
    assert 4000 < cached and read < cached / 2
    assert "Nothing was sparse" not in out and "where to go next" in out
    assert group_members(group) == []
