"""The benchmark of an adapter without an engine: its schedules, its gains, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from ascii_task import save_model_of_bytes
from engines import save_tiny_model

from sparrow_sglang.benchmarks.training import distill_gain
from sparrow_sglang.benchmarks.training.distill_result import gains
from sparrow_sglang.calibration.choice import choose
from sparrow_sglang.mismatch.tail import BinTail
from sparrow_sglang.schedule_names import load_schedule

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    save_model_of_bytes(folder)
    # Weights with so large a spread that the output depends on which pages are read.
    return save_tiny_model(folder, spread=0.15)


def test_the_schedule_to_distil_towards_follows_from_what_was_measured():
    """The rule of `sparrow calibrate` is applied to the tails that a shipped schedule contains."""
    given = load_schedule("smollm2-135m-0.75", 16)
    tails = {
        int(budget): {
            row["bin"]: BinTail(
                row["bin"],
                row["bin"] * given.bin_tokens,
                (row["bin"] + 1) * given.bin_tokens,
                row["tokens"],
                row["tail"],
                row["low"],
                row["high"],
                mean=0.0,
                mean_low=None,
                mean_high=None,
            )
            for row in rows
        }
        for budget, rows in given.provenance["tails"].items()
    }
    bins = len(given.budget_tokens)
    for target, name in (
        (0.75, "smollm2-135m-0.75"),
        (0.65, "benchmarks/schedules/smollm2-135m-0.65.json"),
    ):
        choices = choose(tails, target, bins, given.bin_tokens, given.provenance["min_tokens"])
        path = str(ROOT / name) if name.endswith(".json") else name
        found = load_schedule(path, 16)
        assert found.tail_target == target
        assert found.budget_tokens == tuple(choice.budget for choice in choices)


def test_gains_want_intervals_apart():
    def row(index: int, tail: float, low: float | None, high: float | None) -> dict:
        return {
            "bin": index,
            "first_position": index * 10,
            "end_position": index * 10 + 10,
            "tokens": 5,
            "tail": tail,
            "tail_low": low,
            "tail_high": high,
        }

    before = [row(0, 0.5, 0.4, 0.6), row(1, 0.5, 0.4, 0.6), row(2, 0.5, None, None)]
    after = [row(0, 0.7, 0.61, 0.8), row(1, 0.6, 0.55, 0.8), row(2, 0.4, 0.3, 0.5), row(3, 1, 1, 1)]
    found = [(each["bin"], each["raised"], each["reached"]) for each in gains(before, after)]
    assert found == [(0, True, True), (1, False, True), (2, False, False)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lr", "0"], "--lr 0"),
        (["--steps", "4", "0"], "--steps: expected 1 or more, got 0"),
        (["--schedules", "fixed-512", "fixed-512"], "named twice"),
        (["--schedules", "fixed-512", "fixed-100"], "nearest allowed"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--context", "8000"], "--context 8000"),
        (["--engine-args", "[]"], "--engine-args []"),
    ],
)
def test_refusals_are_one_line_before_anything_starts(model, tmp_path, capsys, arguments, named):
    with pytest.raises(SystemExit) as stopped:
        distill_gain.main(["--model", model, "--out", str(tmp_path / "x.json"), *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and named in line


def test_given_prompts_are_held_out_or_trained_on(model, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    # The first two prompts occur twice; they are held out, so neither copy may be trained on.
    numbers = (*range(7), 0, 1)
    file.write_text("".join(json.dumps({"input_ids": [i + 3] * 30}) + "\n" for i in numbers))
    words = ["--model", model, "--prompts", str(file), "--out", str(tmp_path / "x.json")]
    sizes = ["--context", "100", "--new-tokens", "60", "--steps", "1", "3", "--responses", "2"]
    options = distill_gain._parser().parse_args([*words, *sizes, "--heldout", "3"])
    training, heldout = distill_gain.prompts_for(options, model)
    assert [prompt.input_ids[0] for prompt in heldout] == [3, 4, 5]
    # Three steps of two responses take six prompts, so the first two are used again.
    assert [prompt.input_ids[0] for prompt in training] == [6, 7, 8, 9, 6, 7]
    for more, named in (
        (["--heldout", "7"], "has 7 prompts; expected more than --heldout 7"),
        (["--new-tokens", "68"], "a prompt has 30 tokens; .* expected at most 29"),
        (["--prompts", str(tmp_path / "none")], "none: cannot be read"),
    ):
        with pytest.raises(SystemExit):
            distill_gain.main([*words, *sizes, "--heldout", "3", *more])
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(named, line)


def test_a_context_too_short_for_a_question_is_refused(model, tmp_path, capsys):
    arguments = ["--model", model, "--context", "100", "--new-tokens", "40", "--bin-tokens", "64"]
    with pytest.raises(SystemExit):
        distill_gain.main([*arguments, "--out", str(tmp_path / "x.json")])
    (line,) = capsys.readouterr().err.splitlines()
    assert "tokens is too short for the built-in prompts" in line
