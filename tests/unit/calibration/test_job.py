"""What a calibration is about to generate and score."""

import argparse
import json
import shutil
from pathlib import Path

import pytest

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.job import Job, calibration_job
from sparrow_sglang.commands import calibrate


def test_every_sequence_is_short_enough_to_be_scored(tiny_llama: str, tmp_path: Path) -> None:
    """SGLang takes inputs of at most context - 7 tokens."""
    prompts = tmp_path / "p.jsonl"
    rows = [{"input_ids": list(range(length))} for length in (100, 200, 245, 247, 247)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())
    words = ["--model-path", tiny_llama, "--prompts", str(prompts), "--new-tokens", "50"]
    words += ["--bin-tokens", "64", "--budgets", "64", "--out", str(tmp_path / "out.json")]
    args = parser.parse_args(["calibrate", *words])
    args.engine_args = {"context_length": 256}
    job = calibration_job(args)
    lengths = [len(unit.prompt.input_ids) + unit.new_tokens for unit in job.units]
    assert lengths == [150, 249, 249, 249, 249]
    # The last line repeats the prompt before it, and counts as another sample of that prompt.
    assert job.settings["num_prompts"] == 4


def test_measurements_of_another_checkpoint_are_refused(tiny_llama: str, tmp_path: Path) -> None:
    """Checkpoints of a training run are in folders that are all called `model`."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"input_ids": list(range(100))}) + "\n")
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())

    def job_of(step: str) -> Job:
        folder = tmp_path / step / "model"
        shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
        words = ["--model-path", str(folder), "--prompts", str(prompts), "--budgets", "64"]
        words += ["--bin-tokens", "64", "--out", str(tmp_path / "out.json")]
        args = parser.parse_args(["calibrate", *words])
        args.engine_args = {"context_length": 256}
        return calibration_job(args)

    first, again, other = map(job_of, ("step-000010", "step-000010", "step-000020"))
    assert first.work.path == again.work.path == other.folder
    with pytest.raises(CalibrationError, match="model=.*step-000010.*step-000020.*another folder"):
        _ = other.work
