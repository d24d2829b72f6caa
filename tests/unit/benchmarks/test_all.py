"""`sparrow bench all`: its parts, what it runs, and how it joins results."""

import json
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.benchmarks import all as bench_all
from sparrow_sglang.benchmarks.all import PARTS, Part, limit_s, merged
from sparrow_sglang.commands import cli
from sparrow_sglang.errors import InputError

WHERE = {"device": "H200", "commit": "abc", "packages": {"torch": "2"}, "command": "c"}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_is_a_command_for_each_of_its_sides(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the GPU, and for real weights up to their folder; what only sparrow takes is ignored
    beside another side."""
    monkeypatch.chdir(Path(bench_all.__file__).parent / "schedules")
    verb, *words = shlex.split(PARTS[name].words)
    module = import_module(f"sparrow_sglang.benchmarks.{verb}")
    for side in PARTS[name].seconds:
        with pytest.raises(
            ValueError, match=r"no CUDA device found|qwen2.5-coder-1.5b.*cannot be read"
        ):
            module.main([*words, *(["--sides", side] if side else [])])
        assert 0 < limit_s(PARTS[name], [side]) < 600


def test_a_part_runs_chosen_sides_beside_links_to_what_is_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program in place of the command, which writes its arguments and what it finds."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "name = sys.argv[sys.argv.index('--out') + 1]\n"
        "json.dump([sys.argv[1:], sorted(os.listdir())], open(name, 'w'))\n"
    )
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    weights = tmp_path / "qwen2.5-coder-1.5b"
    weights.mkdir()
    results = shutil.copytree(weights, tmp_path / "results" / weights.name).parent
    words = ["bench", "all", "--part", "rollout-coder", "--sides", "ngram", "stock"]
    words += ["--folder", str(results), "--model-path", str(weights)]
    assert cli.main(words) == 2
    (weights / "config.json").touch()
    assert cli.main(words) == 0
    # What a user has there under the links' names stays.
    file, kept = sorted(results.iterdir(), reverse=True)
    assert (file.name, kept.name) == ("rollout-coder.stock+ngram.json", weights.name)
    ran, found = json.loads(file.read_text())
    assert ran[:3] == ["rollout", "--model-path", "qwen2.5-coder-1.5b"]
    assert ran[-3:] == ["--sides", "stock", "ngram"] and "qwen2.5-coder-1.5b" in found
    assert not any(str(tmp_path) in word for word in ran)


@pytest.mark.parametrize("rows", [[], [{"step_ms": 1.0}]])
def test_a_part_ends_at_its_limit_and_keeps_its_rows(
    rows: list[dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "python"
    text = json.dumps(WHERE | {"rows": rows})
    sleeper.write_text(f"#!/bin/sh\necho '{text}' > ../attention.json\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setitem(PARTS, "attention", Part("attention", {"": 1}))
    words = ["bench", "all", "--part", "attention", "--folder", str(tmp_path)]
    assert cli.main(words) == int(not rows)
    assert json.loads((tmp_path / "attention.json").read_text())["rows"] == rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sides", "fa9"], "--sides fa9: expected some of sparrow stock stock-16 in rollout-8b-"),
        (["--part", "steps-8b", "distill"], "--model-path: expected the folder of"),
        (["--part", "attention", "--folder", "/proc/a"], "--folder /proc/a: cannot be written"),
    ],
)
def test_what_is_wrong_is_reported_before_the_first_part_runs(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_all, "run_part", None)
    with pytest.raises(InputError, match=said):
        bench_all.main(options)


def result(path: Path, side: str, step: int, **fields: Any) -> Path:
    rows = [{"side": side, "step_ms": step}]
    path.write_text(json.dumps(WHERE | {"rows": rows} | fields))
    return path


def test_results_of_sides_are_joined_if_they_are_of_one_commit(tmp_path: Path) -> None:
    result(tmp_path / "steps-8b.stock.json", "stock", 2)
    result(tmp_path / "steps-8b.sparrow.json", "sparrow", 1, command="d")
    result(tmp_path / "sparse-1.7b.json", "sparrow", 9)
    assert cli.main(["bench", "all", "--merge", "--folder", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sparse-1.7b.json", "steps-8b.json"]
    joined = json.loads((tmp_path / "steps-8b.json").read_text())
    assert [row["step_ms"] for row in joined["rows"]] == [1, 2] and joined["command"] == "d; c"
    # A side that is measured later, and one that is measured again.
    result(tmp_path / "steps-8b.stock-16.json", "stock-16", 3)
    result(tmp_path / "steps-8b.stock.json", "stock", 4)
    bench_all.merge_all(tmp_path)
    rows = json.loads((tmp_path / "steps-8b.json").read_text())["rows"]
    assert [row["step_ms"] for row in rows] == [1, 3, 4]
    # A part that was cut replaces no whole one.
    whole = WHERE | {"rows": [{"side": "stock", "step_ms": 1}] * 2}
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    cut = result(tmp_path / "cut.json", "stock", 1)
    with pytest.raises(InputError, match="cut.json: 1 rows of side stock, expected 2 as measured"):
        merged([tmp_path / "whole.json", cut])
    assert len(merged([cut, tmp_path / "whole.json"])["rows"]) == 2
    other = result(tmp_path / "b.json", "stock", 1, commit="def")
    with pytest.raises(ValueError, match="b.json: commit is 'def', expected 'abc'"):
        merged([tmp_path / "steps-8b.json", other])


def test_a_folder_that_cannot_be_joined_is_named_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "steps-8b.stock.json"
    bad_rows = json.dumps(WHERE | {"rows": [3]})
    for content, message in (
        ("{", "not JSON"),
        ("[]", "a list"),
        ('{"rows": []}', "no command"),
        (bad_rows, r"rows=\[3\]"),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=f"{file}: .*{message}.*expected .*a? result of"):
            bench_all.main(["--merge", "--folder", str(tmp_path)])
        assert file.read_text() == content
    with pytest.raises(InputError, match=r"none: nothing to merge; expected files PART.SIDES.json"):
        bench_all.main(["--merge", "--folder", str(tmp_path / "none")])
    assert [*tmp_path.iterdir()] == [file]
