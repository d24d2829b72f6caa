"""`sparrow plan`: its tables against the cost model, and its refusals."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparrow_sglang.commands.plan import add_parser
from sparrow_sglang.planning.cost_model import (
    GPUS,
    ModelShape,
    paper_costs,
    rollout_costs,
    step_costs,
)
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
MODEL = str(MODELS / "qwen3-1.7b")

Plan = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())

    def call(*options: str, model: str = MODEL) -> str:
        args = parser.parse_args(["plan", "--model-path", model, *options])
        assert args.run(args) == 0
        return capsys.readouterr().out

    return call


def section(text: str, title: str) -> list[list[str]]:
    """Rows of the table under `title`, without its heads, split into cells."""
    lines = next(part for part in text.split("\n\n") if part.startswith(title)).splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in lines[2:]]
    return [row for row in cells if len(row) > 2]


def shape_of(model: str = "qwen3-1.7b") -> ModelShape:
    return ModelShape.from_config(json.loads((MODELS / model / "config.json").read_text()))


def speedups(lengths: list[int], schedule: BudgetSchedule, intensity: float) -> float:
    dense, sparse = (
        float(rollout_costs(shape_of(), 512, lengths, 16, use).eflops(intensity))
        for use in (None, schedule)
    )
    return dense / sparse


def test_speedups_are_those_of_the_cost_model(plan: Plan) -> None:
    rows = section(plan("--length", "16384", "4096"), "Expected rollout")
    schedule, intensity = load_schedule("qwen3-1.7b-0.86", 16), GPUS["h200"].intensity
    assert [row[0] for row in rows] == ["4,096", "16,384"]
    for row, length in zip(rows, (4096, 16384), strict=True):
        dense, sparse = (
            paper_costs(shape_of(), 512, [length], 8, use).eflops(intensity)
            for use in (None, schedule)
        )
        assert row[3] == f"{dense / sparse:.2f}x"
        assert row[4] == f"{speedups([length], schedule, intensity):.2f}x"
    # 16,896 cached tokens are 1,056 pages: bin 8 of 125 pages each.
    assert rows[1][1] == f"{schedule.budget_tokens[8]:,}"


def test_a_mixture_of_experts_says_what_a_token_takes(plan: Plan) -> None:
    text = plan("--schedule", "fixed-1024", model=str(MODELS / "qwen3-30b-a3b"))
    words = "3.04 billion weights read by a step of one token, of 30.22 billion (8 of 128 experts)"
    assert words in text and "experts" not in plan()
    # At batch 16: 39.8 GB at 4.8 TB/s.
    assert section(text, "Where a decode step")[0][2] == "8.29"


def test_the_headline_is_the_step_models_speedup(plan: Plan) -> None:
    schedule, intensity = load_schedule("qwen3-1.7b-0.86", 16), GPUS["h200"].intensity
    expected = speedups([16384], schedule, intensity)
    text = plan("--length", "4096", "16384")
    assert text.startswith(f"qwen3-1.7b decodes {expected:.2f}x as fast as dense")
    assert "generations of 16,384 tokens, 16 at a time on H200" in text.splitlines()[1]


def test_the_embedded_model_goes_by_its_name(plan: Plan) -> None:
    text = plan(model="smollm2-135m")
    assert text.startswith("smollm2-135m decodes") and "smollm2-135m-int4-0.86" in text


def test_an_unreachable_hub_is_named_as_such(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Nothing listens on port 9 of this machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the Hugging Face hub cannot be reached"):
        plan(model="nobody/has-this-model")


def test_parts_of_a_step_add_up_and_are_milliseconds(plan: Plan) -> None:
    rows = section(plan("--length", "32256"), "Where a decode step goes, ms")
    dense, sparse = rows[0][1:], rows[1]
    assert (dense[0], sparse[0]) == ("dense", "sparse")
    for name, *cells, gain in (dense, sparse):
        parts = [float(cell) for cell in cells]
        assert sum(parts[:4]) == pytest.approx(parts[4], abs=0.03), name
        assert gain.endswith("x")
    # 16 sequences of 32,768 tokens of 112 KiB at 4.8 TB/s; 1.72e9 weights of 2 bytes.
    assert float(dense[2]) == pytest.approx(16 * 32768 * 114_688 / 4.8e12 * 1e3, abs=0.006)
    assert float(dense[1]) == pytest.approx(1.7204e9 * 2 / 4.8e12 * 1e3, abs=0.006)
    assert float(dense[3]) == 0 and float(sparse[3]) > 0.3


def test_an_fp8_cache_halves_what_is_read_of_keys_and_values(plan: Plan) -> None:
    title = "Where a decode step goes, ms"
    whole, halved = (
        section(plan("--length", "32256", "--kv-cache-dtype", dtype), title)
        for dtype in ("bf16", "fp8_e4m3")
    )
    for before, after in zip((whole[0][1:], whole[1]), (halved[0][1:], halved[1]), strict=True):
        assert float(after[2]) == pytest.approx(float(before[2]) / 2, abs=0.011)
        # Weights, landmarks and FLOPs stay the same.
        assert [after[i] for i in (1, 3, 4)] == [before[i] for i in (1, 3, 4)]


def test_intensity_alone_counts_flops(plan: Plan) -> None:
    text = plan("--intensity", "206.0416667", "--length", "8192")
    assert "206 FLOPs in the time of reading a byte;" in text
    (dense, _) = section(text, "Where a decode step goes, TFLOP")
    cost = step_costs(shape_of(), [8704], 16)
    assert float(dense[6]) == pytest.approx(float(cost.eflops(206.0416667)[0]) * 16e-12, abs=0.006)
    same = section(plan("--gpu", "h200", "--length", "8192"), "Expected rollout")
    assert section(text, "Expected rollout") == same


def test_finds_the_schedule_of_the_model(plan: Plan) -> None:
    text = plan(model=str(MODELS / "qwen3-14b" / "config.json"))
    assert text.startswith("qwen3-14b decodes ")
    assert "schedule qwen3-14b-0.86 (calibrated)" in text


def test_names_the_model_that_a_schedule_was_calibrated_for(plan: Plan) -> None:
    text = plan("--schedule", "qwen3-8b-0.86", model=str(MODELS / "qwen3-4b" / "config.json"))
    assert "schedule qwen3-8b-0.86 (calibrated for Qwen3-8B, not for this model)" in text


def test_takes_a_schedule_file_with_its_own_page_size(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    BudgetSchedule(name="mine", page_size=64, bin_tokens=640, budget_tokens=(640,)).save(file)
    assert "schedule mine (not calibrated): 640 to 640 tokens, pages of 64" in plan(
        "--schedule", str(file)
    )
    assert "schedule fixed-512" in plan("--schedule", "fixed-512", "--page-size", "32")


def test_lengths_stay_within_the_models_context(plan: Plan, tmp_path: Path) -> None:
    config = json.loads((MODELS / "qwen3-1.7b" / "config.json").read_text())
    for context, expected in ((8192, ["2,048", "4,096"]), (1024, ["512"])):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": context})
        )
        rows = section(plan(model=str(tmp_path)), "Expected rollout")
        assert [row[0] for row in rows] == expected


def test_refuses_counts_below_one(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("--length", "5", "0")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "argument --length: expected 1 or more, got 0" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--intensity", "nan"], "--intensity=nan"),
        (["--schedule", "qwen3-1.7b-0.87"], "is not known"),
        (["--schedule", "fixed-100"], "budget_tokens"),
        (["--length", "8", "10000000000"], "at most 10000000"),
    ],
)
def test_refuses_options_that_make_no_sense(plan: Plan, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(*options)


def test_refuses_models_without_a_usable_config(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json: cannot be read"):
        plan(model=str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        plan(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="num_hidden_layers=None"):
        plan(model=str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        plan(model="/absent/folder")


@pytest.mark.parametrize(
    ("model", "field", "value", "message"),
    [
        ("qwen3-1.7b", "max_position_embeddings", "x", "='x' in .*: expected a whole number"),
        ("qwen3-30b-a3b", "mlp_only_layers", 3, "=3 in .*: expected a list"),
        ("gemma3-12b", "layer_types", 1.5, "=1.5 in .*: expected a list"),
        ("qwen3.5-9b", "text_config", "x", "='x' in .*: expected an object"),
    ],
)
def test_names_a_field_of_another_type(
    plan: Plan, tmp_path: Path, model: str, field: str, value: object, message: str
) -> None:
    config = json.loads((MODELS / model / "config.json").read_text())
    owner = config["text_config"] if field in config.get("text_config", {}) else config
    owner[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=field + message):
        plan(model=str(tmp_path))
