"""run.json: which steps of a run came from which software and settings."""

from pathlib import Path

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.run import record_start
from sparrow_sglang.run_folder import RUN_FILE, read_starts


def test_a_start_replaces_those_whose_steps_it_takes_again(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=tmp_path, task={"name": "story"})
    noted = []
    for step in (0, 3, 5, 3, 8, 0):
        record_start(config, config.engine, step, None)
        noted.append([start["step"] for start in read_starts(tmp_path / RUN_FILE)])
    assert noted == [[0], [0, 3], [0, 3, 5], [0, 3], [0, 3, 8], [0]]
