"""The command lines of `sparrow bench` on a machine without a GPU."""

import re

import pytest
import torch
from command_lines import refusal

from sparrow_sglang.commands import cli


@pytest.mark.parametrize("benchmark", cli.BENCHMARKS)
def test_without_a_gpu_one_line_says_what_is_needed(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal(["bench", benchmark], capsys)
    assert error.startswith("no CUDA device found")
    assert re.search(r"about \d\d GB of free memory", error)
