"""Where the schedule comes from when several sources name one."""

import pytest

from sparrow_sglang.schedule_names import named_schedule


def test_the_flag_comes_before_the_variable_and_this_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARROW_SCHEDULE", "from-variable")
    assert named_schedule("from-flag", False) == "from-flag"
    assert named_schedule(None, False) == "from-variable"
    monkeypatch.setenv("SPARROW_SCHEDULE", "")
    assert named_schedule(None, False) == "auto"
    monkeypatch.delenv("SPARROW_SCHEDULE")
    assert named_schedule(None, False) == "auto"
