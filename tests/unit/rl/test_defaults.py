"""`sparrow train --defaults`: a file of all settings, which can be loaded as it is."""

from pathlib import Path

import pytest

from sparrow_sglang.commands.cli import main
from sparrow_sglang.rl.config import EvaluationConfig, OptimizerConfig, TrainConfig


def test_the_printed_file_loads_as_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--defaults"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "run.toml").write_text(text)
    loaded = TrainConfig.load(tmp_path / "run.toml")
    assert loaded == TrainConfig.parse({"run_dir": "runs/my-run", "task": {"name": "story"}})
    for section in (TrainConfig, OptimizerConfig, EvaluationConfig):
        for name, field in section.model_fields.items():
            assert name in text and (field.description or "").split("\n")[0][:40] in text


def test_without_a_file_the_error_names_the_way_to_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train"]) == 2
    assert "sparrow train --defaults prints one" in capsys.readouterr().err
