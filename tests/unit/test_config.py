"""Where the schedule comes from when several sources name one, and what is said of bad sources."""

import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from sparrow_sglang.config import SparrowConfig, schedule_from
from sparrow_sglang.errors import InputError

NO_OVERRIDE = SimpleNamespace()


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    monkeypatch.delenv("SPARROW_CONFIG", raising=False)
    monkeypatch.delenv("SPARROW_SCHEDULE", raising=False)


def test_default_is_the_model_s_schedule():
    config, source = SparrowConfig.resolve(None, NO_OVERRIDE)
    assert (config.schedule, source) == ("auto", "the model's default")


def test_precedence(monkeypatch):
    """Every source named a schedule of its own; take away the first that applies, one by one."""
    override = SimpleNamespace(sparrow={"schedule": "from-override"})
    monkeypatch.setenv("SPARROW_CONFIG", '{"schedule": "from-config"}')
    monkeypatch.setenv("SPARROW_SCHEDULE", "from-variable")
    seen = [SparrowConfig.resolve("from-field", override)]
    seen.append(SparrowConfig.resolve(None, override))
    seen.append(SparrowConfig.resolve(None, NO_OVERRIDE))
    monkeypatch.delenv("SPARROW_CONFIG")
    seen.append(SparrowConfig.resolve(None, NO_OVERRIDE))
    assert [(config.schedule, source) for config, source in seen] == [
        ("from-field", "--sparrow-schedule"),
        ("from-override", "json_model_override_args"),
        ("from-config", "SPARROW_CONFIG"),
        ("from-variable", "SPARROW_SCHEDULE"),
    ]


def test_a_source_that_names_no_schedule_is_passed_over(monkeypatch):
    monkeypatch.setenv("SPARROW_CONFIG", "{}")
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed-512")
    config, source = SparrowConfig.resolve(None, SimpleNamespace(sparrow={}))
    assert (config.schedule, source) == ("fixed-512", "SPARROW_SCHEDULE")


def test_empty_variables_count_as_unset(monkeypatch):
    monkeypatch.setenv("SPARROW_CONFIG", "")
    monkeypatch.setenv("SPARROW_SCHEDULE", "")
    assert SparrowConfig.resolve(None, NO_OVERRIDE)[0].schedule == "auto"


def test_config_variable_may_be_a_path(monkeypatch, tmp_path):
    path = tmp_path / "sparrow.json"
    path.write_text(json.dumps({"schedule": "fixed-1024"}))
    monkeypatch.setenv("SPARROW_CONFIG", str(path))
    assert SparrowConfig.resolve(None, NO_OVERRIDE)[0].schedule == "fixed-1024"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"scedule": "x"}', "SPARROW_CONFIG: unknown key 'scedule': did you mean 'schedule'"),
        ('{"schedule": 512}', "SPARROW_CONFIG: schedule=512 is not allowed: expected a string"),
        ('{"schedule": ""}', "SPARROW_CONFIG: schedule='' is empty"),
        ('{"schedule": "a,,b"}', "SPARROW_CONFIG: schedule='a,,b' is empty or has an empty part"),
        ('{"schedule": ', "SPARROW_CONFIG: not JSON"),
        ("/no/such/file.json", "SPARROW_CONFIG=/no/such/file.json: cannot be read"),
    ],
)
def test_bad_config_variable(monkeypatch, value, message):
    monkeypatch.setenv("SPARROW_CONFIG", value)
    with pytest.raises(InputError) as error:
        SparrowConfig.resolve(None, NO_OVERRIDE)
    assert message in str(error.value)


def test_a_bad_source_is_refused_even_when_another_one_wins(monkeypatch):
    monkeypatch.setenv("SPARROW_CONFIG", '{"budget": 512}')
    with pytest.raises(InputError, match="unknown key 'budget'"):
        SparrowConfig.resolve("fixed-512", NO_OVERRIDE)


@pytest.mark.parametrize("content", ["", "[1, 2]", "schedule: x"])
def test_bad_config_file(monkeypatch, tmp_path, content):
    path = tmp_path / "sparrow.json"
    path.write_text(content)
    monkeypatch.setenv("SPARROW_CONFIG", str(path))
    with pytest.raises(InputError, match="expected a JSON object"):
        SparrowConfig.resolve(None, NO_OVERRIDE)


def test_bad_override():
    with pytest.raises(InputError, match="json_model_override_args: holds a str"):
        SparrowConfig.resolve(None, SimpleNamespace(sparrow="fixed-512"))


def test_several_schedules_are_separated_by_commas():
    config, _ = SparrowConfig.resolve("m-0.86, fixed-512,x/y.json", NO_OVERRIDE)
    assert config.schedules == ("m-0.86", "fixed-512", "x/y.json")


def test_a_command_that_passes_a_schedule_on_names_where_it_has_it_from(monkeypatch):
    monkeypatch.setenv("SPARROW_SCHEDULE", "from-variable")
    with schedule_from("engine.schedule in run.toml"):
        assert SparrowConfig.resolve("m-0.86", NO_OVERRIDE)[1] == "engine.schedule in run.toml"
        assert SparrowConfig.resolve(None, NO_OVERRIDE)[1] == "SPARROW_SCHEDULE"
    assert SparrowConfig.resolve("m-0.86", NO_OVERRIDE)[1] == "--sparrow-schedule"


def test_frozen():
    with pytest.raises(ValidationError):
        SparrowConfig().schedule = "other"
