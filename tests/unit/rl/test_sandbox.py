"""What the sandbox requires before it runs a program."""

import shutil
from pathlib import Path

import pytest

from sparrow_sglang.rl.sandbox.run import SandboxError, check_sandbox, run_python


def test_without_bubblewrap_programs_are_refused_with_both_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else which(name))
    with pytest.raises(SandboxError, match="bwrap is not installed") as caught:
        check_sandbox("bubblewrap")
    message = str(caught.value)
    assert "\n" not in message and "apt-get install -y bubblewrap" in message
    assert 'task.options.sandbox = "http://HOST:8080"' in message
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        run_python("print(1)")
    with pytest.raises(SandboxError, match="refused.*expected the address of a SandboxFusion"):
        check_sandbox("http://127.0.0.1:1")


def test_bubblewrap_may_be_installed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "bwrap"
    here.write_text("#!/bin/sh\necho mine >&2\nexit 1\n")
    here.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxError, match="mine"):
        run_python("print(1)")
