"""What a calibration is about to generate and score."""

import argparse
import json
from pathlib import Path

from sparrow_sglang.calibration.job import calibration_job
from sparrow_sglang.commands import calibrate


def test_every_sequence_is_short_enough_to_be_scored(tiny_llama: str, tmp_path: Path) -> None:
    """SGLang takes inputs of at most context - 7 tokens."""
    prompts = tmp_path / "p.jsonl"
    rows = [{"input_ids": list(range(length))} for length in (100, 200, 245, 247)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())
    words = ["--model-path", tiny_llama, "--prompts", str(prompts), "--new-tokens", "50"]
    words += ["--bin-tokens", "64", "--budgets", "64", "--out", str(tmp_path / "out.json")]
    args = parser.parse_args(["calibrate", *words])
    args.engine_args = {"context_length": 256}
    job = calibration_job(args)
    lengths = [len(unit.prompt.input_ids) + unit.new_tokens for unit in job.units]
    assert lengths == [150, 249, 249, 249]
