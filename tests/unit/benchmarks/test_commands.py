"""The command lines of `sparrow bench` on a machine without a GPU."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from command_lines import refusal

from sparrow_sglang.benchmarks import kernels, rollout, step
from sparrow_sglang.commands import cli


@pytest.mark.parametrize("benchmark", cli.BENCHMARKS)
def test_without_a_gpu_one_line_says_what_is_needed(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal(["bench", benchmark], capsys)
    assert error.startswith("no CUDA device found")
    assert re.search(r"about \d\d GB of free memory", error)


def test_the_commands_in_the_help_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    texts = [cli.BENCH_EPILOG]
    texts += [each.EXAMPLES for each in (step, kernels, rollout)]
    commands = re.findall(r"^  (sparrow bench .*?)(?: {2,}.*)?$", "\n".join(texts), re.M)
    assert len(commands) > 12
    for command in commands:
        with pytest.raises(SystemExit):
            cli.main(shlex.split(command)[1:])
        # The missing GPU is all that is wrong.
        assert "no CUDA device found" in capsys.readouterr().err, command
