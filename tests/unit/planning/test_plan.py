"""`sparrow plan`: its table against the model of steps, what fits, and its refusals."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparrow_sglang.benchmarks import common, step
from sparrow_sglang.commands.plan import ROUNDS, add_arguments, run
from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import ASSUMED, GPUS, predict
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"

Plan = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def call(*options: str, model: str = "qwen3-8b") -> str:
        args = parser.parse_args(["--model-path", str(MODELS / model), *options])
        assert run(args) == 0
        return capsys.readouterr().out

    return call


def rows(text: str) -> dict[tuple[int, int], list[str]]:
    """Cells of the table by batch and cached tokens."""
    cells = [re.split(r" {2,}", line.strip()) for line in text.split("\n\n")[1].splitlines()[1:]]
    return {(int(row[0]), int(row[1].replace(",", ""))): row[2:] for row in cells}


@pytest.mark.parametrize("gpu", ["h200", "H200"])
def test_table_and_headline_are_predictions_of_cases_that_fit(plan: Plan, gpu: str) -> None:
    text = plan("--gpu", gpu)
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    shape, schedule = ModelShape.from_config(config), load_schedule("qwen3-8b-0.86", 16)
    gains: dict[str, list[tuple[float, tuple[int, int]]]] = {"lossless": [], "sparse": []}
    # 64 sequences of 32,768 tokens have 309 GB of KV.
    assert len(rows(text)) == 8 and "do not fit into memory: 64 x 32,768" in text
    for case, cells in rows(text).items():
        expected = predict(
            shape, GPUS["h200"], case, ASSUMED, ROUNDS, BudgetSchedule.drafts(), schedule
        )
        times = [expected.dense_ms, expected.lossless_ms, expected.sparse_ms]
        assert [cells[0], cells[1], cells[5]] == [f"{ms:.2f}" for ms in times]
        assert cells[3:5] == [str(count) for count in expected.round[:2]]
        for mode, ms, shown in zip(gains, times[1:], (cells[2], cells[6]), strict=True):
            assert shown == f"{times[0] / ms:.2f}x"
            gains[mode].append((times[0] / ms, case))
    for mode, found in gains.items():
        gain, (batch, cached) = max(found)
        assert f"{mode}: up to {gain:.2f}x as fast as stock, at {batch} x {cached:,}" in text


def test_plan_and_benchmarks_assume_the_same_acceptance(plan: Plan) -> None:
    options = step._parser().parse_args([])
    rates = common.random_weights(options)
    assert (options.acceptance_rate, options.lookup_acceptance) == rates == (0.94, 0.45)
    assert "with 0.94 of the sparse drafts and 0.45 of the looked-up tokens accepted" in plan()


def test_a_headline_of_a_case_that_fits(plan: Plan) -> None:
    text = plan("--gpu", "h100", "--batch", "16", model="qwen3-4b")
    assert "do not fit into memory: 16 x 32,768" in text
    assert "16 x 32,768" not in text.split("\n\n")[0] and len(rows(text)) == 2
    with pytest.raises(InputError, match="no case fits into 80 GB: the smallest needs"):
        plan("--gpu", "h100", "--batch", "64", "--length", "32768")


def test_sparse_steps_need_a_schedule_of_the_model(plan: Plan, tmp_path: Path) -> None:
    own = plan()
    assert "by schedule qwen3-8b-0.86 (calibrated)" in own
    assert "(NOT calibrated)" in plan("--schedule", "fixed-1024")
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 35}))
    without = plan(model=str(tmp_path))
    assert "sparse: no schedule is shipped for this model" in without and "up to" in without
    assert {len(cells) for cells in rows(without).values()} == {5}


def test_no_gain_without_acceptance_and_under_a_budget_for_all(plan: Plan) -> None:
    text = plan("--length", "300", "--schedule", "fixed-512", "--acceptance", "0")
    assert "lossless: up to" in text and "sparse: no gain" in text
    text = plan("--acceptance", "0", "--lookup-acceptance", "0")
    assert "lossless: no gain" in text
    assert {tuple(cells[2:5]) for cells in rows(text).values()} == {("1.00x", "0", "0")}


def test_refusals(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="--length 60000: expected the model's 40960 at most"):
        plan("--length", "8", "60000")
    for flag, value in (("--acceptance", "1.1"), ("--lookup-acceptance", "x")):
        with pytest.raises(SystemExit):
            plan(flag, value)
        assert f"argument {flag}: expected 0 to 1, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_position_embeddings", "4k"),
        ("max_position_embeddings", -1),
        ("text_config", 5),
        ("num_key_value_heads", "8"),
        ("head_dim", [128]),
        ("hidden_size", True),
        ("num_hidden_layers", None),
        ("layer_types", "full_attention"),
        ("full_attention_interval", 0),
    ],
)
def test_a_damaged_config(plan: Plan, tmp_path: Path, field: str, value: object) -> None:
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    problem = f"{field}={value!r} in the model's config.json: expected a"
    with pytest.raises(InputError, match=re.escape(problem)):
        plan(model=str(tmp_path))
