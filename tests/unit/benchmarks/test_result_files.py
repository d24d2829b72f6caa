"""Results that a run goes on with, and those that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.benchmarks.result_files import Results, resumed
from sparrow_sglang.errors import InputError

FIELDS = {"settings": {"seed": 1}}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A result file with two rows and the field `before`."""
    out = tmp_path / "out.json"
    results = Results(out, **FIELDS)
    results.add({"case": "a"}, {"case": "b"})
    results.save(before=0.5)
    return out


def test_a_run_goes_on_with_rows_and_fields(out: Path) -> None:
    resumed(out, FIELDS, ("before",)).add({"case": "c"})
    content = json.loads(out.read_text())
    assert [row["case"] for row in content["rows"]] == ["a", "b", "c"]
    assert (content["settings"], content["before"]) == ({"seed": 1}, 0.5)


def test_every_command_that_has_measured_rows_is_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads(out.read_text())["command"]
    for argv in (["bench", "--cases", "c"], ["bench", "--cases", "c"], ["bench", "--cases", "d"]):
        monkeypatch.setattr("sys.argv", argv)
        resumed(out, FIELDS).add({"case": argv[-1]})
    content = json.loads(out.read_text())
    assert content["command"] == "bench --cases d"
    assert content["earlier_commands"] == [first, "bench --cases c"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"device": "NVIDIA B200"}, "device NVIDIA B200, this run has {device}"),
        ({"commit": "abc-dirty"}, "commit abc-dirty, this run has {commit}"),
        ({"packages": {"torch": "1.0"}}, "torch 1.0, this run has {packages[torch]}"),
        ({"packages": {"sglang": None}}, "sglang None, this run has {packages[sglang]}"),
    ],
)
def test_rows_of_another_device_commit_or_package_are_refused_by_name_and_value(
    changed: dict[str, Any], named: str, out: Path
) -> None:
    content = json.loads(out.read_text())
    packages = content["packages"] | changed.get("packages", {})
    out.write_text(json.dumps(content | changed | {"packages": packages}))
    with pytest.raises(InputError) as refused:
        resumed(out, FIELDS)
    assert f"was measured with {named.format(**content)}: expected no file" in str(refused.value)


def test_a_field_of_the_run_replaces_what_provenance_says(out: Path) -> None:
    fields = FIELDS | {"device": "one thread"}
    Results(out, **fields).add({"case": "a"})
    assert len(resumed(out, fields).rows) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {"seed": 2}, "rows": []}'])
def test_what_is_no_result_of_the_run_is_refused(text: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text(text)
    with pytest.raises(InputError, match="holds something else, or was measured with other sett"):
        resumed(out, FIELDS)
