"""`sparrow bench step` without an engine: engines that fail, and a run that goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.benchmarks.processes import ProcessFailed
from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT
from sparrow_sglang.benchmarks.steps import decode_step
from sparrow_sglang.commands import cli


class Steps:
    """`sparrow bench step` with 2 ms for a sparse step, 8 ms for a dense one, and no engine.

    It ends as by SIGTERM, or an engine fails, once the engine that `ends` or `fails` names,
    (backend, schedule), has measured one case.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out = out
        self.started: list[tuple[Any, ...]] = []
        self.ends: tuple[str, str] | None = None
        self.fails: tuple[str, str] | None = None
        monkeypatch.setattr(decode_step, "require_cuda", lambda *needs: None)
        monkeypatch.setattr(decode_step, "yielded_in_new_process", self._measure)

    def _measure(
        self, _: Any, options: Any, model: str, backend: str, schedule: str, cases: list[str]
    ) -> Iterator[dict[str, Any]]:
        self.started.append((model, backend, schedule, *cases))
        for case in cases:
            served = schedule if backend == "sparrow" else None
            row = {"model": model, "backend": backend, "schedule": served, "case": case}
            row |= {"tp": options.tp, "ep": options.ep, "floor_ms": 1.0}
            yield row | {"step_ms": 2.0 if served else 8.0}
            if (backend, schedule) == self.ends:
                raise SystemExit(143)
            if (backend, schedule) == self.fails:
                raise ProcessFailed("out of memory")

    def run(self, *words: str) -> int:
        """Run the command and return its exit code; `started` has what this run has started."""
        self.started = []
        usual = ["--models", "qwen3-4b", "--schedules", "fixed-512", "fixed-1024"]
        usual += ["--cases", "2x1000", "1x500", "--out", str(self.out)]
        return cli.main(["bench", "step", *usual, *words])

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.out.read_text())
        return content

    def cases(self) -> list[tuple[str, str | None, str]]:
        return [(r["backend"], r["schedule"], r["case"]) for r in self.content()["rows"]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steps:
    return Steps(monkeypatch, tmp_path / "new" / "step.json")


def test_what_an_engine_measures_before_it_fails_is_kept_and_the_others_are_measured(
    steps: Steps,
) -> None:
    steps.fails = ("sparrow", "fixed-512")
    assert steps.run() == 1
    assert steps.cases() == [
        ("flashinfer", None, "2x1000"),
        ("flashinfer", None, "1x500"),
        ("sparrow", "fixed-512", "2x1000"),
        ("sparrow", "fixed-1024", "2x1000"),
        ("sparrow", "fixed-1024", "1x500"),
    ]
    content = steps.content()
    assert [each["speedup"] for each in content["speedups"]] == [4.0] * 3
    assert {"device", "packages", "commit", "command"} <= content.keys()
    assert [path.name for path in steps.out.parent.iterdir()] == ["step.json"]


def test_steps_go_on_with_the_engines_and_cases_that_are_missing(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.ends = ("sparrow", "fixed-512")
    with pytest.raises(SystemExit, match="143"):
        steps.run()
    killed = steps.content()
    assert len(killed["rows"]) == 3 and len(killed["speedups"]) == 1
    steps.ends = None
    assert steps.run() == 0
    assert steps.started == [
        ("qwen3-4b", "sparrow", "fixed-512", "1x500"),
        ("qwen3-4b", "sparrow", "fixed-1024", "2x1000", "1x500"),
    ]
    content = steps.content()
    assert content["rows"][:3] == killed["rows"]
    assert (len(content["rows"]), len(content["speedups"])) == (6, 4)
    capsys.readouterr()
    assert steps.run("--engine-args", " {}") == 0
    assert steps.started == [] and steps.content() | {"command": ""} == content | {"command": ""}
    printed = capsys.readouterr().out
    assert "step.json: has 6 rows, which are not measured again" in printed
    assert printed.count("4.00x") == 4


def test_other_engines_and_cases_come_into_the_same_file(steps: Steps) -> None:
    steps.run("--backends", "flashinfer")
    assert steps.run("--backends", "fa3", "--cases", "1x500", "3x700") == 0
    assert steps.run("--backends", "fa3,flashinfer", "--cases", "3x700", "--tp", "2") == 0
    assert steps.run("--backends", "fa3,flashinfer", "--models", "qwen3-4b,qwen3-8b") == 0
    assert steps.started == [
        ("qwen3-4b", "fa3", "fixed-512", "2x1000"),
        ("qwen3-8b", "fa3", "fixed-512", "2x1000", "1x500"),
        ("qwen3-8b", "flashinfer", "fixed-512", "2x1000", "1x500"),
    ]
    assert len(steps.cases()) == 2 + 2 + 2 + 5


@pytest.mark.parametrize(
    "words",
    [
        ("--repeats", "5"),
        ("--memory-fraction", "0.5"),
        ("--engine-args", '{"kv_cache_dtype": "fp8_e4m3"}'),
    ],
)
def test_steps_measured_otherwise_do_not_come_into_the_same_file(
    words: tuple[str, str], steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.run("--backends", "flashinfer")
    before = steps.out.read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        steps.run(*words)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "was measured with other settings: expected no file, or one to go on with" in line
    assert steps.started == [] and steps.out.read_text() == before


def test_a_result_of_before_runs_went_on_is_not_overwritten(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.out.parent.mkdir()
    committed = ROOT / RESULTS / "h200" / "decode_step_qwen3-1.7b.json"
    steps.out.write_text(committed.read_text())
    with pytest.raises(SystemExit):
        steps.run()
    assert "holds something else" in capsys.readouterr().err
    assert steps.out.read_text() == committed.read_text()
