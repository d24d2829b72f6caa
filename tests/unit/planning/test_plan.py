"""`sparrow plan`: its tables against the cost model, and its refusals."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import sparrow_sglang.planning.step_time as step_times
from sparrow_sglang.commands.plan import add_parser, run
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import step_time
from sparrow_sglang.schedules.names import load_schedule

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
MODEL = str(MODELS / "qwen3-1.7b")

Plan = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())

    def call(*options: str, model: str = MODEL) -> str:
        args = parser.parse_args(["plan", "--model-path", model, *options])
        assert run(args) == 0
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
    assert float(gaining[5]) < float(gaining[1]) and int(gaining[8]) > 1
    short = rows(plan("--length", "2048", "--batch", "1", "--draft-weights", "model"))[2048]
    assert short[5:] == [short[1], "1.00x", "1.00x", "0"]


def test_a_response_gains_what_its_steps_do(plan: Plan) -> None:
    lengths = [str(512 * (i + 1)) for i in range(64)]
    steps = rows(plan("--length", *lengths))
    dense, sparse, lossless = (sum(float(r[i]) for r in steps.values()) for i in (1, 2, 5))
    last = steps[32768]
    assert float(last[4][:-1]) == pytest.approx(dense / sparse, abs=0.02)
    assert float(last[7][:-1]) == pytest.approx(dense / lossless, abs=0.02)
    assert dense / lossless < float(last[6][:-1])


def test_the_gpu_of_this_machine_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(step_times, "DRIVER", tmp_path)
    assert step_times.local_gpu() == "h100"
    (tmp_path / "0000:01:00.0").mkdir()
    file = tmp_path / "0000:01:00.0" / "information"
    for name, gpu in [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("L4", "h100")]:
        file.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 18\n")
        assert step_times.local_gpu() == gpu


def test_lossless_drafts_under_its_own_default_schedule(plan: Plan) -> None:
    model = str(MODELS / "qwen3-30b-a3b")
    assert plan(model=model) == plan("--schedule", "drafts", model=model)
    default, drafts, chosen = (
        rows(plan(*options))[32768]
        for options in ([], ["--schedule", "drafts"], ["--schedule", "qwen3-1.7b-0.86"])
    )
    assert default[5:] == drafts[5:] != chosen[5:] and default[:5] == chosen[:5] != drafts[:5]


def test_drafts_of_large_models_use_fp8_copies_unless_told_otherwise(plan: Plan) -> None:
    model = str(MODELS / "qwen3-8b")
    by_itself, fp8, own, on_a100 = (
        plan("--length", "8192", "--batch", "4", *options, model=model)
        for options in (
            ["--gpu", "h200"],
            ["--gpu", "h200", "--draft-weights", "fp8"],
            ["--gpu", "h200", "--draft-weights", "model"],
            ["--gpu", "a100"],
        )
    )
    assert by_itself == fp8 and "FP8 copies of the weights" in fp8
    assert float(rows(fp8)[8192][5]) < float(rows(own)[8192][5])
    assert "the model's weights" in own and "the model's weights" in on_a100


def test_no_lossless_times_for_models_that_lossless_decoding_rejects(plan: Plan) -> None:
    assert len(rows(plan(model=str(MODELS / "gemma3-12b")))[4096]) == 5


def test_no_gain_and_its_reason(plan: Plan) -> None:
    text = plan("--length", "300", "--schedule", "fixed-512")
    assert "no gain" in text and "nothing is sparse at 300 tokens" in text
    assert rows(text)[300][0] == "all"
    two_heads = plan("--batch", "1", "--length", "2048")
    assert "no gain" in two_heads and "fixed cost" in two_heads


def test_an_fp8_cache_is_read_faster(plan: Plan) -> None:
    whole, halved = (
        float(rows(plan("--length", "32768", "--kv-cache-dtype", dtype))[32768][2])
        for dtype in ("bf16", "fp8_e4m3")
    )
    assert halved < 0.9 * whole
    large = ["--length", "32768", "--batch", "24", "--gpu", "h100"]
    assert "94 GB" in plan(*large) and "GB" not in plan(*large, "--kv-cache-dtype", "fp8_e4m3")
