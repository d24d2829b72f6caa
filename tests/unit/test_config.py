"""Where the schedule comes from when several sources name one, and what is said of bad sources."""

import pytest

from sparrow_sglang.config import named_schedules, schedule_from
from sparrow_sglang.errors import InputError


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv("SPARROW_SCHEDULE", "from-variable")


def test_the_flag_comes_before_the_variable_and_this_before_the_model(monkeypatch):
    assert named_schedules("from-flag") == (("from-flag",), "--sparrow-schedule")
    assert named_schedules(None) == (("from-variable",), "SPARROW_SCHEDULE")
    monkeypatch.setenv("SPARROW_SCHEDULE", "")
    assert named_schedules(None) == (("auto",), "the model's default")
    monkeypatch.delenv("SPARROW_SCHEDULE")
    assert named_schedules(None) == (("auto",), "the model's default")


@pytest.mark.parametrize("value", ["", "a,,b", "a,", 512])
def test_bad_values_are_refused_with_their_source(monkeypatch, value):
    with pytest.raises(InputError, match=f"--sparrow-schedule: '?{value}'?: expected a shipped"):
        named_schedules(value)
    monkeypatch.setenv("SPARROW_SCHEDULE", "a, ,b")
    with pytest.raises(InputError, match="SPARROW_SCHEDULE: 'a, ,b': expected"):
        named_schedules(None)


def test_several_schedules_are_separated_by_commas():
    names, _ = named_schedules("m-0.86, fixed-512,x/y.json")
    assert names == ("m-0.86", "fixed-512", "x/y.json")


def test_a_command_that_passes_a_schedule_on_names_where_it_has_it_from():
    with schedule_from("engine.schedule in run.toml"):
        assert named_schedules("m-0.86")[1] == "engine.schedule in run.toml"
        assert named_schedules(None)[1] == "SPARROW_SCHEDULE"
    assert named_schedules("m-0.86")[1] == "--sparrow-schedule"
