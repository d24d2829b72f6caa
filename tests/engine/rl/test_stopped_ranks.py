"""SIGTERM to every process of a run at once, engines included, as job schedulers send it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import ascii_task
import psutil
import pytest
from ascii_task import rows
from training import optimizer_steps

from sparrow_sglang.benchmarks.training.parallel_runs import toml_lines

SETTINGS = {
    "steps": 50,
    "distributed": {"ranks": 2},
    "task": {"name": "ascii_task:load", "reward_workers": 1},
    "engine": {
        "schedule": "fixed-48",
        "server_args": {"max_total_tokens": 4096, "grammar_backend": "none"},
    },
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_prompt_tokens": 64},
    "evaluation": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
}


@pytest.mark.slow
def test_ranks_write_their_checkpoint(byte_model: str, tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "run.toml"
    values = SETTINGS | {"run_dir": str(run_dir), "model": {"path": byte_model}}
    values["rollout"] = SETTINGS["rollout"] | {"max_new_tokens": 60}
    file.write_text("\n".join(toml_lines(values)))
    paths = os.pathsep.join([str(Path(ascii_task.__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(file)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    for line in process.stdout:
        said.append(line)
        # The sync needs the engines, and is not interrupted.
        if "step 3/50 sync" in line:
            everyone = psutil.Process(process.pid).children(recursive=True)
            for each in [psutil.Process(process.pid), *everyone]:
                each.terminate()
            break
    said += process.communicate(timeout=200)[0].splitlines(keepends=True)
    output = "".join(said)
    assert process.returncode == 128 + signal.SIGTERM, output
    taken = len(rows(run_dir))
    assert taken >= 2
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{taken:06d}"
    assert optimizer_steps(checkpoint) == {taken}
    assert f"sparrow train: stopped\nthe newest checkpoint is {checkpoint}" in output
    assert not [each for each in everyone if each.is_running() and each.status() != "zombie"]
