"""run.json: which steps of a run came from which software and settings."""

import platform
from importlib.metadata import version
from pathlib import Path

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.run import record_start
from sparrow_sglang.run_folder import RUN_FILE, read_starts
from sparrow_sglang.schedule import BudgetSchedule


def test_a_start_says_what_trains_with_which_settings(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=tmp_path, steps=7, task={"name": "story"})
    engine = config.engine.model_copy(update={"schedule": "fixed-512"})
    record_start(config, engine, 0, BudgetSchedule.fixed(512))
    (start,) = read_starts(tmp_path / RUN_FILE)
    assert start["packages"]["sglang"] == version("sglang")
    assert start["python"] == platform.python_version()
    assert {"device", "commit", "command", "date"} <= start.keys()
    expected = config.model_dump(mode="json")
    expected["engine"]["schedule"] = "fixed-512"
    assert start["config"] == expected and start["tail_bin_tokens"] == 2000


def test_a_start_replaces_those_whose_steps_it_takes_again(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=tmp_path, task={"name": "story"})
    noted = []
    for step in (0, 3, 5, 3, 8, 0):
        record_start(config, config.engine, step, None)
        noted.append([start["step"] for start in read_starts(tmp_path / RUN_FILE)])
    assert noted == [[0], [0, 3], [0, 3, 5], [0, 3], [0, 3, 8], [0]]
