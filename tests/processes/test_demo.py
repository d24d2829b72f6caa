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


def server_groups(process: "subprocess.Popen[str]", servers: int) -> list[int]:
    """Process groups of the demo's servers, once that many run."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        children = [child.pid for child in psutil.Process(process.pid).children()]
        groups = [pid for pid in children if _group(pid) == pid]
        if len(groups) == servers:
            return groups
        time.sleep(0.1)
    raise AssertionError(f"the demo did not start {servers} servers")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_demo_stops_its_server(signum: signal.Signals) -> None:
    process = start_demo()
    try:
        groups = server_groups(process, 2)
        time.sleep(3)
        process.send_signal(signum)
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[signum]
    assert [group_members(group) for group in groups] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_streams_a_sparse_answer_and_leaves_nothing_behind() -> None:
    process = start_demo("--sparse-only", "--tokens", "8")
    try:
        [group] = server_groups(process, 1)
        out, err = process.communicate(timeout=560)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert process.returncode == 0, err
    assert "generated         8 tokens" in out
    cached, read = (
        int(line.split()[3]) for line in out.splitlines() if line.startswith("KV tokens")
    )
    assert 4000 < cached and read < cached / 2
    assert "where to go next" in out
    assert group_members(group) == []
