"""`sparrow plan`: its tables against the cost model, and its refusals."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparrow_sglang.commands.plan import add_parser
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import step_time
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


def rows(text: str) -> dict[int, list[str]]:
    """Cells of the table by cached tokens."""
    cells = [re.split(r" {2,}", line.strip()) for line in text.split("\n\n")[1].splitlines()[1:]]
    return {int(row[0].replace(",", "")): row[1:] for row in cells}


def test_one_prediction_fills_table_and_headline(plan: Plan) -> None:
    text = plan("--length", "16384", "4096", "--gpu", "h100")
    shape = ModelShape.from_config(json.loads((MODELS / "qwen3-1.7b" / "config.json").read_text()))
    schedule = load_schedule("qwen3-1.7b-0.86", 16)
    assert list(rows(text)) == [4096, 16384]
    for cached, (_, dense, sparse, gain, *_) in rows(text).items():
        times = [step_time(shape, "h100", 16, cached, use).total for use in (None, schedule)]
        assert [dense, sparse] == [f"{ms:.2f}" for ms in times]
        assert gain == f"{times[0] / times[1]:.2f}x"
    assert f"{rows(text)[16384][3]} as fast as dense at 16,384 tokens" in text.splitlines()[0]


def test_lossless_is_dense_where_drafts_do_not_pay(plan: Plan) -> None:
    gaining = rows(plan("--length", "32768"))[32768]
    assert float(gaining[5]) < float(gaining[1]) and int(gaining[7]) > 1
    assert rows(plan("--length", "2048", "--batch", "1"))[2048][5:] == ["dense"]


def test_no_gain_and_its_reason(plan: Plan) -> None:
    text = plan("--length", "300", "--schedule", "fixed-512")
    assert "no gain" in text and "nothing is sparse at 300 tokens" in text
    assert rows(text)[300][0] == "all"
    two_heads = plan("--batch", "1", "--length", "4096")
    assert "no gain" in two_heads and "fixed cost" in two_heads


def test_an_fp8_cache_is_read_faster(plan: Plan) -> None:
    whole, halved = (
        float(rows(plan("--length", "32768", "--kv-cache-dtype", dtype))[32768][2])
        for dtype in ("bf16", "fp8_e4m3")
    )
    assert halved < 0.9 * whole


def test_the_embedded_model_goes_by_its_name(plan: Plan) -> None:
    text = plan(model="smollm2-135m")
    assert text.startswith("smollm2-135m, schedule smollm2-135m-int4-0.86")


def test_an_unreachable_hub_is_named_as_such(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Nothing listens on port 9 of this machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the Hugging Face hub cannot be reached"):
        plan(model="nobody/has-this-model")


def test_finds_the_schedule_of_the_model(plan: Plan) -> None:
    text = plan(model=str(MODELS / "qwen3-14b" / "config.json"))
    assert text.startswith("qwen3-14b, schedule qwen3-14b-0.86 (calibrated)")


def test_names_the_model_that_a_schedule_was_calibrated_for(plan: Plan) -> None:
    text = plan("--schedule", "qwen3-8b-0.86", model=str(MODELS / "qwen3-4b" / "config.json"))
    assert "schedule qwen3-8b-0.86 (calibrated for Qwen3-8B, not for this model)" in text


def test_takes_a_schedule_file_with_its_own_page_size(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    BudgetSchedule(name="mine", page_size=64, bin_tokens=640, budget_tokens=(640,)).save(file)
    assert "schedule mine (not calibrated)" in plan("--schedule", str(file))
    assert "schedule fixed-512" in plan("--schedule", "fixed-512", "--page-size", "32")


def test_lengths_stay_within_the_models_context(plan: Plan, tmp_path: Path) -> None:
    config = json.loads((MODELS / "qwen3-1.7b" / "config.json").read_text())
    for context, expected in ((8192, [2048, 4096, 8192]), (1024, [1024])):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": context})
        )
        assert list(rows(plan(model=str(tmp_path)))) == expected


def test_refuses_counts_below_one(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("--length", "5", "0")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "argument --length: expected 1 or more, got 0" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--acceptance", "1"], "--acceptance 1"),
        (["--schedule", "qwen3-1.7b-0.87"], "is not known"),
        (["--schedule", "fixed-100"], "budget_tokens"),
        (["--length", "8", "60000"], "--length 60000"),
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
