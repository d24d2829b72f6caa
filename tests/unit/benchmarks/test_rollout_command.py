"""`sparrow bench rollout` without an engine: wrong options, and a side that fails."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import refusal
from small_benchmarks import ROLLOUT

from sparrow_sglang.benchmarks.steps import comparison
from sparrow_sglang.benchmarks.steps.comparison import Side
from sparrow_sglang.commands import cli


def test_what_was_measured_survives_a_side_that_fails_and_is_not_measured_again(
    tiny_qwen3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fails = {"dense"}
    started: list[str] = []

    def run_side(_: Any, compared: Any, side: Side, options: Any) -> list[dict[str, Any]] | None:
        started.append(side.name)
        if side.name in fails:
            return None
        row = {"model": "m", "backend": side.backend, "schedule": side.schedule}
        measured = {"tokens_per_s": 4.0 if side.schedule else 2.0, "ended_s": [1.0, 2.0]}
        return [row | measured]

    monkeypatch.setattr(comparison, "in_new_process", run_side)
    out = tmp_path / "rollout.json"
    words = ["bench", "rollout", "--model-path", tiny_qwen3, "--schedule", "fixed-64", *ROLLOUT]
    words += ["--out", str(out)]
    assert cli.main(words) == 1
    first = json.loads(out.read_text())
    assert ([row["schedule"] for row in first["rows"]], first["compared"]) == (["fixed-64"], None)
    fails.clear()
    assert cli.main(words) == 0
    second = json.loads(out.read_text())
    assert [row["schedule"] for row in second["rows"]] == ["fixed-64", None]
    assert second["rows"][:1] == first["rows"] and second["compared"]["speedup"] == 2.0
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "2.00x the dense tokens/s" in capsys.readouterr().out
    assert started == ["sparse", "dense", "dense"]
    for other in (["--seed", "1"], ["--prompt-tokens", "9"], ["--schedule", "fixed-96"]):
        assert "was measured with other settings" in refusal([*words, *other], capsys)
    assert json.loads(out.read_text()) | {"command": ""} == second | {"command": ""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sequences", "12"], "--sequences 12: expected a multiple of 8"),
        (["--sequences", "0"], "--sequences: expected 1 or more, got 0"),
        (["--mean-tokens", "500"], "--mean-tokens 500: expected 1 or more, and less than"),
        (["--prompt-tokens", "4050"], "do not fit into the model's context of 4096"),
        (["--engine-args", "[]"], "--engine-args []: expected a JSON object"),
        (
            ["--engine-args", '{"tp_sise": 2}'],
            "--engine-args: tp_sise is no argument of SGLang: did you mean 'tp_size'",
        ),
        (["--schedule", "fixed-60"], "60"),
        (["--dense-backend", "sparrow"], "--dense-backend sparrow: expected a dense backend"),
        (["--lengths-file", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--model-path", "/nowhere"], "--model-path /nowhere: expected the folder"),
    ],
)
def test_nonsense_is_refused_in_one_line_before_an_engine_starts(
    words: list[str],
    message: str,
    tiny_qwen3: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(comparison, "in_new_process", None)
    usual = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *ROLLOUT]
    assert message in refusal(["bench", "rollout", *usual, *words], capsys)
