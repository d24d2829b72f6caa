"""`sparrow plan`: its tables against the cost model, and its refusals."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.commands.plan import add_parser
from sparrow_sglang.planning.cost_model import (
    GPUS,
    ModelShape,
    Workload,
    paper_speedup,
    rollout_costs,
    step_costs,
)
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
MODEL = str(MODELS / "qwen3-1.7b")
DENSE = [(2048, 3.13), (8192, 5.65), (16384, 9.06), (32768, 16.2)]

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
        formula = paper_speedup(shape_of(), Workload(512, length, 8), schedule, intensity)
        assert row[3] == f"{formula:.2f}x"
        assert row[4] == f"{speedups([length], schedule, intensity):.2f}x"
    # 16,896 cached tokens are 1,056 pages: bin 8 of 125 pages each.
    assert rows[1][1] == f"{schedule.budget_tokens[8]:,}"


def test_a_mixture_of_experts_says_what_a_token_takes(plan: Plan) -> None:
    text = plan("--schedule", "fixed-1024", model=str(MODELS / "qwen3-30b-a3b"))
    words = "3.04 billion weights read by a step of one token, of 30.22 billion (8 of 128 experts)"
    assert words in text and "experts" not in plan()
    # At batch 16: 39.8 GB at 4.8 TB/s.
    assert section(text, "Where a decode step")[0][2] == "8.29"


def test_the_headline_is_the_step_models_speedup(plan: Plan, tmp_path: Path) -> None:
    schedule, intensity = load_schedule("qwen3-1.7b-0.86", 16), GPUS["h200"].intensity
    expected = speedups([16384], schedule, intensity)
    text = plan("--length", "4096", "16384")
    assert text.startswith(f"qwen3-1.7b decodes {expected:.2f}x as fast as dense")
    assert "generations of 16,384 tokens, 16 at a time on H200" in text.splitlines()[1]
    file = tmp_path / "lengths.json"
    file.write_text("[100, 20000]")
    expected = speedups([100, 20000], schedule, intensity)
    text = plan("--lengths-file", str(file))
    assert text.startswith(f"qwen3-1.7b decodes {expected:.2f}x as fast as dense")
    assert "2 generations of 10,050 tokens on average" in text.splitlines()[1]


def test_the_embedded_model_goes_by_its_name(plan: Plan) -> None:
    text = plan(model="smollm2-135m")
    assert text.startswith("smollm2-135m decodes") and "smollm2-135m-0.86" in text


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


def test_a_length_distribution_is_summed_not_averaged(plan: Plan, tmp_path: Path) -> None:
    lengths = [100] * 50 + [1000, 20000, 30000]
    file = tmp_path / "lengths.jsonl"
    file.write_text("\n".join([*map(str, lengths[:-1]), '{"length": 30000, "id": 7}', ""]))
    rows = section(plan("--lengths-file", str(file)), "Expected rollout speed-up over 53 gen")
    schedule = load_schedule("qwen3-1.7b-0.86", 16)
    assert [row[0] for row in rows] == ["2,048", "4,096", "8,192", "16,384", "30,000", "mean 1,057"]
    intensity = GPUS["h200"].intensity
    assert rows[-1][-1] == f"{speedups(lengths, schedule, intensity):.2f}x"
    # Nearly all requests are short and gain nothing, nearly all tokens belong to the long ones.
    assert float(rows[-1][-1].rstrip("x")) > 2


def test_intensity_alone_counts_flops(plan: Plan) -> None:
    text = plan("--intensity", "206.0416667", "--length", "8192")
    assert "206 FLOPs in the time of reading a byte;" in text
    (dense, _) = section(text, "Where a decode step goes, TFLOP")
    cost = step_costs(shape_of(), [8704], 16)
    assert float(dense[6]) == pytest.approx(float(cost.eflops(206.0416667)[0]) * 16e-12, abs=0.006)
    same = section(plan("--gpu", "h200", "--length", "8192"), "Expected rollout")
    assert section(text, "Expected rollout") == same


def measured_rows(sparse: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "model": "qwen3-1.7b",
            "backend": "flashinfer",
            "case": f"16x{length}",
            "batch": 16,
            "bytes": 16 * float(step_costs(shape_of(), [length], 16).bytes[0]),
            "step_ms": ms,
        }
        for length, ms in DENSE
    ]
    rows.append(rows[0] | {"model": "qwen3-4b", "step_ms": 99.0})
    if sparse:
        for gigabytes in (8.0, 16.0):
            rows.append(
                {
                    "model": "qwen3-1.7b",
                    "backend": "sparrow",
                    "case": f"{gigabytes} GB",
                    "schedule": "qwen3-1.7b-0.86",
                    "bytes": gigabytes * 1e9,
                    "step_ms": gigabytes / 4.0 + 2.0,
                }
            )
    return rows


@pytest.mark.parametrize("sparse", [False, True])
def test_measured_steps_stand_beside_the_formula(plan: Plan, tmp_path: Path, sparse: bool) -> None:
    file = tmp_path / "decode_step.json"
    file.write_text(json.dumps({"device": "H200", "rows": measured_rows(sparse)}))
    text = plan("--measured", str(file), "--length", "32768")
    rows = section(text, "Measured steps")
    assert len(rows) == (6 if sparse else 4)
    for label, _, _, measured, fitted, residual in rows:
        assert float(fitted) + float(residual) == pytest.approx(float(measured), abs=0.011), label
    assert rows[3][3] == "16.20" and abs(float(rows[3][5])) < 0.15
    (row,) = section(text, "Expected rollout")
    assert len(row) == 6
    if sparse:
        assert "dense: 4.3" in text and "sparse: 4.00 TB/s plus 2.00 ms a step" in text
    else:
        assert "all steps: 4.3" in text
    # The constant of each step eats into the gain that bytes alone promise.
    assert 1 < float(row[5].rstrip("x")) < float(row[4].rstrip("x"))


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b", "14b"])
def test_finds_the_schedule_of_each_model(plan: Plan, size: str) -> None:
    text = plan(model=str(MODELS / f"qwen3-{size}" / "config.json"))
    assert text.startswith(f"qwen3-{size} decodes ")
    assert f"schedule qwen3-{size}-0.86 (calibrated)" in text


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


@pytest.mark.parametrize(
    "options",
    [["--samples", "0"], ["--batch", "-2"], ["--prompt-tokens", "x"], ["--length", "5", "0"]],
)
def test_refuses_counts_below_one(
    plan: Plan, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan(*options)
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {options[0]}: expected 1 or more, got {options[-1]}" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--intensity", "0"], "--intensity=0.0"),
        (["--intensity", "nan"], "--intensity=nan"),
        (["--schedule", "qwen3-1.7b-0.87"], "is not known"),
        (["--schedule", "fixed-100"], "budget_tokens"),
        (["--lengths-file", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--measured", "absent.json"], r"absent.json.*: cannot be read"),
    ],
)
def test_refuses_options_that_make_no_sense(plan: Plan, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(*options)


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--lengths-file", "12\nabc\n", r':2: "abc" is no length'),
        ("--measured", "{", "not JSON"),
        ("--measured", "{}", "holds no rows"),
        ("--measured", "[]", "holds a list"),
        ("--measured", '{"rows": [{"model": "other", "step_ms": 3}]}', "it measures model other"),
        ("--measured", '{"rows": [{"step_ms": 3}]}', "bytes=None"),
        ("--measured", '{"rows": [{"bytes": 1e9, "step_ms": 3}]}', "1 different sizes"),
    ],
)
def test_refuses_files_that_hold_something_else(
    plan: Plan, tmp_path: Path, option: str, text: str, message: str
) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        plan(option, str(file))


@pytest.mark.parametrize("other", [{"tp": 2}, {"ep": 2}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_steps_of_other_gpus_or_caches_are_not_those_of_the_plan(
    plan: Plan, tmp_path: Path, other: dict[str, Any]
) -> None:
    """Their bytes are those of a rank, or of another cache."""
    file = tmp_path / "decode_step.json"
    rows = [row | {"step_ms": row["step_ms"] / 2} | other for row in measured_rows(True)]
    file.write_text(json.dumps({"rows": rows}))
    with pytest.raises(ValueError, match="steps like this plan's; it measures model"):
        plan("--measured", str(file))
    alone = plan("--measured", _written(tmp_path, measured_rows(True)))
    assert plan("--measured", _written(tmp_path, measured_rows(True) + rows)) == alone


def _written(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.json"
    file.write_text(json.dumps({"rows": rows}))
    return str(file)


def test_refuses_models_without_a_usable_config(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json: cannot be read"):
        plan(model=str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        plan(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="hidden_size=None"):
        plan(model=str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        plan(model=str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        plan(model="/absent/folder")
