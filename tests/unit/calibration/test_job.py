"""What a calibration is about to generate and score."""

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3_5Config

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.job import (
    Job,
    calibration_job,
    check_job,
    find_model,
    origin,
    require_files,
)
from sparrow_sglang.commands import calibrate
from sparrow_sglang.schedule import BudgetSchedule


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


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["calibrate", *words])
    args.engine_args = {"context_length": 256}
    return args


def test_a_check_judges_by_the_target_that_was_asked_for(tiny_llama: str, tmp_path: Path) -> None:
    schedule, prompts = tmp_path / "s.json", tmp_path / "p.jsonl"
    fields = {"page_size": 32, "bin_tokens": 64, "budget_tokens": (96,), "tail_target": 0.75}
    BudgetSchedule(name="s", **fields).save(schedule)
    prompts.write_text(json.dumps({"input_ids": list(range(100))}) + "\n")
    words = ["--model-path", tiny_llama, "--prompts", str(prompts), "--check", str(schedule)]
    assert check_job(parsed(*words)).targets == [0.75]
    asked = check_job(parsed(*words, "--target", "0.92"))
    assert asked.targets == [0.92] and asked.settings["page_size"] == 32
    with pytest.raises(CalibrationError, match="--target 0.8 0.9 with --check: expected one"):
        check_job(parsed(*words, "--target", "0.8", "0.9"))
    with pytest.raises(CalibrationError, match="--page-size 64 with --check: s has pages of 32"):
        check_job(parsed(*words, "--page-size", "64"))


@pytest.mark.parametrize("name", ["page_size", "sparrow_schedule", "random_seed"])
def test_the_engine_is_not_told_otherwise(tiny_llama: str, tmp_path: Path, name: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"input_ids": list(range(100))}) + "\n")
    args = parsed("--model-path", tiny_llama, "--prompts", str(prompts), "--bin-tokens", "64")
    args.engine_args |= {name: 32}
    with pytest.raises(CalibrationError, match=f"--engine-args {name} is not set there"):
        calibration_job(args)
    # Of two engines one generates, and the other may be asked to compare.
    args.engine_args = {"dp_size": 2}
    with pytest.raises(CalibrationError, match="--engine-args dp_size=2: expected 1"):
        calibration_job(args)


def test_measurements_of_other_weights_in_the_same_folder_are_refused(
    tiny_llama: str, tmp_path: Path
) -> None:
    model, prompts = tmp_path / "model", tmp_path / "p.jsonl"
    shutil.copytree(tiny_llama, model)
    prompts.write_text(json.dumps({"input_ids": list(range(100))}) + "\n")
    words = ["--model-path", str(model), "--prompts", str(prompts), "--bin-tokens", "64"]
    words += ["--budgets", "64", "--work", str(tmp_path / "work")]
    assert calibration_job(parsed(*words)).work.path == calibration_job(parsed(*words)).work.path
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(CalibrationError, match="made with weights="):
        _ = calibration_job(parsed(*words)).work


def test_texts_of_responses_pass_the_check_without_a_tokenizer(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a", "response": "b c"}\n')
    require_files(parsed("--model-path", "smollm2-135m", "--prompts", str(prompts)))


def test_a_model_of_several_modalities_is_known_by_its_language_model(tmp_path: Path) -> None:
    """Its outer config has neither a context length nor layers."""
    config = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    _, _, found, context = find_model(str(tmp_path), {})
    text = config.text_config
    assert context == text.max_position_embeddings
    fields = origin(SimpleNamespace(model="m", hf_config=found))["model_match"]
    assert (fields["hidden_size"], fields["num_hidden_layers"]) == (
        text.hidden_size,
        text.num_hidden_layers,
    )
    schedule = BudgetSchedule.fixed(64).model_copy(update={"model_match": fields})
    assert schedule.matches(found)
    text.num_hidden_layers += 4
    assert not schedule.matches(config)
