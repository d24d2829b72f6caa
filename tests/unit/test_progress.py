"""Progress on a terminal, in a file, and beside an engine that kills all processes of ours."""

import re
import time

import pytest

from sparrow_sglang.progress import Progress


def test_a_file_gets_a_dated_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(2, "step")
    progress.where = "step 1/2 "
    finished = progress.counter("rollout", 16, "responses")
    finished()
    progress.say("step 1/2, reward 0.5")
    now += 61
    finished(15)
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == "step 1/2, reward 0.5\n"
    first, last = captured.err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 1/2 rollout 0/16 responses", first)
    assert last.endswith(" step 1/2 rollout 16/16 responses")
