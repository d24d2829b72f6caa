"""Where the schedule comes from when several sources name one, and what is said of bad sources."""

import pytest

from sparrow_sglang.config import named_schedule, schedule_from
from sparrow_sglang.errors import InputError


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv("SPARROW_SCHEDULE", "from-variable")


def test_the_flag_comes_before_the_variable_and_this_before_the_model(monkeypatch):
    assert named_schedule("from-flag") == ("from-flag", "--sparrow-schedule")
    assert named_schedule(None) == ("from-variable", "SPARROW_SCHEDULE")
    monkeypatch.setenv("SPARROW_SCHEDULE", "")
    assert named_schedule(None) == ("auto", "the model's default")
    monkeypatch.delenv("SPARROW_SCHEDULE")
    assert named_schedule(None) == ("auto", "the model's default")


@pytest.mark.parametrize("value", ["", " ", "a,b", 512])
def test_bad_values_are_refused_with_their_source(monkeypatch, value):
    with pytest.raises(InputError, match="--sparrow-schedule: "):
        named_schedule(value)
    monkeypatch.setenv("SPARROW_SCHEDULE", "a,b")
    with pytest.raises(InputError, match="SPARROW_SCHEDULE: 'a,b'"):
        named_schedule(None)


def test_a_command_that_passes_a_schedule_on_names_where_it_has_it_from():
    with schedule_from("engine.schedule in run.toml"):
        assert named_schedule("m-0.86")[1] == "engine.schedule in run.toml"
        assert named_schedule(None)[1] == "SPARROW_SCHEDULE"
    assert named_schedule("m-0.86")[1] == "--sparrow-schedule"
