"""The command `sparrow` as a process: its words and its exit codes."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sparrow_sglang.commands.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--help"], ["sparrow serve", "sparrow doctor", "KV pages"]),
        (["serve", "--help"], ["examples:", "--help-all", "sparrow doctor"]),
        (["serve", "-h", "--port", "1"], ["examples:"]),
        (["doctor", "--help"], ["examples:", "exit code 1"]),
        (["plan", "--help"], ["Predict", "--model-path", "--lengths-file"]),
        (["bench", "--help"], ["examples", "sparrow bench step --models", "NVIDIA GPU"]),
        (["bench", "step", "-h"], ["examples", "fill:LOW-HIGH:TOKENS", "qwen3-14b"]),
        (["--version"], [version("sparrow-sglang")]),
    ],
)
def test_help_and_version_need_no_sglang(argv: list[str], words: list[str]) -> None:
    done = run(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "invalid choice: 'srve' (choose from 'serve', 'doctor'"),
        ([], "required: COMMAND"),
        (["plan"], "required: --model-path"),
        (["bench"], "required: benchmark"),
        (["bench", "stp"], "'stp' (choose from 'step', 'kernels', 'rollout', 'serving', 'train')"),
        (["bench", "step", "--models", "qwen3"], "--models 'qwen3': expected some of gemma3-12b"),
        (["bench", "--", "step"], "without --"),
    ],
)
def test_a_wrong_command_is_one_line(argv: list[str], message: str) -> None:
    done = run(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_plan_needs_neither_torch_nor_sglang_nor_scipy() -> None:
    """Importing any of them takes longer than the answer."""
    model = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-1.7b"
    code = """
import sys
from sparrow_sglang.commands import cli
code = cli.main(sys.argv[1:])
sys.exit(code or " ".join({"torch", "sglang", "scipy"} & set(sys.modules)) or 0)
"""
    command = [sys.executable, "-c", code, "plan", "--model-path", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Expected rollout speed-up" in done.stdout
