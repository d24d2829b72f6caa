"""What a calibration is about to generate and score."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from task_files import jsonl
from transformers import Qwen3_5Config

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration import job as calibration_jobs
from sparrow_sglang.calibration.job import CalibrationOptions, calibration_job, check_job
from sparrow_sglang.calibration.prompts import builtin_prompts
from sparrow_sglang.calibration.samples import Tokens
from sparrow_sglang.commands import cli
from sparrow_sglang.schedules.schedule import BudgetSchedule


@pytest.fixture
def options(tiny_llama: str, tmp_path: Path) -> CalibrationOptions:
    return CalibrationOptions(
        model_path=tiny_llama,
        prompts=jsonl(tmp_path / "p.jsonl", [{"input_ids": list(range(100))}]),
        bin_tokens=64,
        budgets=(64,),
        out=tmp_path / "out.json",
        engine_args={"context_length": 256},
    )


def test_every_sequence_is_short_enough_to_be_scored(
    options: CalibrationOptions, tmp_path: Path
) -> None:
    """SGLang takes inputs of at most context - 7 tokens."""
    rows = [{"input_ids": list(range(length))} for length in (100, 200, 245, 247, 247)]
    prompts = jsonl(tmp_path / "p.jsonl", rows)
    job = calibration_job(replace(options, prompts=prompts, new_tokens=50))
    lengths = [len(sample.prompt.input_ids) + sample.new_tokens for sample in job.samples]
    assert lengths == [150, 249, 249, 249, 249]
    # The last line repeats the prompt before it, and counts as another sample of that prompt.
    assert job.settings["num_prompts"] == 4


def test_a_token_beyond_the_vocabulary_is_refused(
    options: CalibrationOptions, tmp_path: Path
) -> None:
    prompts = jsonl(tmp_path / "p.jsonl", [{"input_ids": [1, 256]}])
    with pytest.raises(CalibrationError, match="p.jsonl:1"):
        calibration_job(replace(options, prompts=prompts))


@pytest.mark.parametrize(
    ("prompts", "min_tokens", "message"),
    [(7, 100, "7 prompts and 182 tokens at most"), (8, 250, "8 prompts and 208 tokens at most")],
)
def test_what_no_bin_could_be_judged_by_is_refused_before_an_engine_starts(
    tiny_llama: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prompts: int,
    min_tokens: int,
    message: str,
) -> None:
    rows = [{"input_ids": [i, *range(107)]} for i in range(prompts)]
    flags = {
        "model-path": tiny_llama,
        "prompts": jsonl(tmp_path / "p.jsonl", rows),
        "out": tmp_path / "out.json",
        "min-tokens": min_tokens,
        "bin-tokens": 64,
        # Steps attend to 109 to 138 tokens; in whole pages, 26 of the 30 reach 128 or more.
        "new-tokens": 31,
        "budgets": 64,
        "rule": "published",
        "engine-args": '{"context_length": 256}',
    }
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    assert cli.main(["calibrate", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_check_judges_by_the_target_that_was_asked_for(
    options: CalibrationOptions, tmp_path: Path
) -> None:
    schedule = tmp_path / "s.json"
    fields = {"page_size": 32, "bin_tokens": 64, "budget_tokens": (96,), "tail_target": 0.75}
    BudgetSchedule(name="s", **fields).save(schedule)
    check = replace(options, bin_tokens=None, budgets=(), check=[str(schedule)])
    assert check_job(check).targets == [0.75]
    asked = check_job(replace(check, target=[0.92]))
    assert asked.targets == [0.92] and asked.settings["page_size"] == 32
    with pytest.raises(CalibrationError, match="--target"):
        check_job(replace(check, target=[0.8, 0.9]))


def test_more_generations_than_a_calibration_makes_are_refused() -> None:
    with pytest.raises(CalibrationError, match="1572864 built-in prompts"):
        builtin_prompts(lambda text: [1] * 9, 2**20, 16, 100, 24, "check")


def test_measurements_of_another_machine_dtype_sglang_or_of_other_weights_are_refused(
    options: CalibrationOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(options.model_path, model)
    options = replace(options, model_path=str(model), work=tmp_path / "work")
    calibration_job(options).work.add({0: Tokens("p", np.array([5]), np.array([0.5]))})
    assert list(calibration_job(options).work.load()) == [0]
    for field, name in {
        "device": "device_name",
        "dtype": "engine_dtype",
        "sglang": "version",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(calibration_jobs, name, lambda *_: "another")
            with pytest.raises(CalibrationError, match=f"{field}=.*another"):
                _ = calibration_job(options).work
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(CalibrationError, match="weights"):
        _ = calibration_job(options).work


def test_a_schedule_that_is_dense_on_all_prompts_cannot_be_checked(
    options: CalibrationOptions, tmp_path: Path
) -> None:
    for tokens in (64, 256):
        fields = BudgetSchedule.fixed(tokens).model_dump() | {"tail_target": 0.8}
        BudgetSchedule(**fields).save(tmp_path / f"{tokens}.json")
    specs = [str(tmp_path / f"{tokens}.json") for tokens in (64, 256)]
    check = replace(options, bin_tokens=None, budgets=())
    assert check_job(replace(check, check=specs[:1])).samples
    with pytest.raises(CalibrationError, match="fixed-256"):
        check_job(replace(check, check=specs))


def test_the_int4_rule_is_the_default_except_with_linear_attention(
    options: CalibrationOptions, tmp_path: Path
) -> None:
    start = calibration_job(options).start
    assert (start.selection, start.dense_layers) == ("int4", ())
    Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"]).save_pretrained(tmp_path)
    linear = replace(options, model_path=str(tmp_path))
    start = calibration_job(linear).start
    assert (start.selection, start.dense_layers) == ("published", (0, 1))
    with pytest.raises(CalibrationError, match="--rule"):
        calibration_job(replace(linear, rule="int4"))
