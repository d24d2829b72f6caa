"""The first examples stay small, and the training file is valid."""

from pathlib import Path

import pytest

from sparrow_sglang.rl.config import TrainConfig

FOLDER = Path(__file__).parents[3] / "examples"
SMALL = ("serve_and_ask.py", "offline_engine.py")


@pytest.mark.parametrize("name", SMALL)
def test_a_small_example_is_small(name: str) -> None:
    assert f"python {name}\n" in (FOLDER / "README.md").read_text("utf-8")
    assert len((FOLDER / name).read_text("utf-8").splitlines()) < 30


def test_the_training_file_is_allowed() -> None:
    assert TrainConfig.load(FOLDER / "story_smollm2.toml").task.name == "story"
