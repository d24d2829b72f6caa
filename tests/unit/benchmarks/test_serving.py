"""`sparrow bench serving` without a server: wrong options, and a client that was refused."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import refusal
from small_benchmarks import SERVING

from sparrow_sglang.benchmarks import serving


def test_requests_that_were_not_answered_are_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        out = Path(command[command.index("--output-file") + 1])
        out.write_text(json.dumps({"completed": 2, "server_info": {}}) + "\n")
        return subprocess.CompletedProcess(command, 0, stdout="refused: queue is full")

    monkeypatch.setattr(
        serving, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE, STDOUT=None)
    )
    options = serving._parser().parse_args(SERVING)
    with pytest.raises(RuntimeError, match="(?s)2 of 3 requests.*queue is full"):
        serving.drive("http://127.0.0.1:1", tmp_path, options, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts: expected 1 or more, got 0"),
        (["--max-concurrency", "0"], "--max-concurrency: expected 1 or more, got 0"),
        (["--range-ratio", "1.5"], "--range-ratio 1.5: expected a share from 0 to 1"),
        (["--request-rate", "0"], "--request-rate 0.0: expected more than 0"),
        (["--request-rate", "nan"], "--request-rate nan: expected more than 0"),
        (["--input-len", "4096"], "do not fit into the model's context of 4096"),
        (["--schedule", "fixed-1x"], "schedule 'fixed-1x' is not known"),
    ],
)
def test_nonsense_is_refused_in_one_line_before_a_server_starts(
    words: list[str],
    message: str,
    tiny_qwen3: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serving, "running_server", None)
    usual = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SERVING]
    assert message in refusal(["bench", "serving", *usual, *words], capsys)
