"""The benchmark of training steps: the trainer's own steps on responses of given lengths."""

import json
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.benchmarks.result_files import RESULTS
from sparrow_sglang.benchmarks.tables import generate
from sparrow_sglang.benchmarks.training import step_times
from sparrow_sglang.rl.runs.checkpoint import Checkpoints

LENGTHS = [5, 60, 17, 9, 3, 30, 16, 22, 4, 8, 15, 16, 23, 42, 2, 1, 80, 10, 11, 12, 13, 14, 7, 6]
SUMS = [sum(LENGTHS[first : first + 8]) for first in (0, 8, 16)]


def test_steps_take_the_lengths_that_they_are_given(
    byte_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(Checkpoints, "save", lambda *parts: saved.append(parts))
    monkeypatch.setattr(step_times, "in_new_process", lambda function, *given: function(*given))
    lengths, out = tmp_path / "lengths.json", tmp_path / RESULTS / "cpu" / "steps.json"
    lengths.write_text(json.dumps(LENGTHS))
    words = ["--model-path", byte_model, "--schedule", "fixed-48", "--lengths-file", str(lengths)]
    words += ["--sequences", "24", "--prompt-tokens", "40", "--steps", "3", "--out", str(out)]
    for setting in (
        "engine.server_args.max_total_tokens=8192",
        "mismatch.sequences=2",
        "model.gradient_checkpointing=false",
        "task.reward_workers=1",
    ):
        words += ["--set", setting]
    assert step_times.main([*words, "--arms", "dense"]) == 0
    # The second call runs only the arms that are missing.
    assert step_times.main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["dense", "sparse", "partial"]
    assert [row["schedule"] for row in rows] == [None, "fixed-48", "fixed-48"]
    for row in rows[:2]:
        assert row["trained_tokens"] == row["sampled_tokens"] == [sum(LENGTHS)] * 3
        assert row["longest"] == [80] * 3
        assert row["stale_token_fraction"] == [0.0] * 3
    # Whole groups, some of them begun in the step before.
    possible = {sum(three) for three in combinations_with_replacement(SUMS, 3)}
    assert set(rows[2]["trained_tokens"]) <= possible
    assert max(rows[2]["stale_token_fraction"]) > 0
    for row in rows:
        seconds = row["seconds"]
        phases = ("rollout", "logprobs", "mismatch", "update", "sync")
        parts = [sum(at_step) for at_step in zip(*(seconds[name] for name in phases), strict=True)]
        assert all(0 < part < step for part, step in zip(parts, seconds["step"], strict=True))
        speed = sum(row["trained_tokens"]) / sum(seconds["step"])
        assert row["trained_tokens_per_s"] == pytest.approx(speed)
    assert saved == []
    partial = rows[2]["trained_tokens_per_s"] / rows[0]["trained_tokens_per_s"]
    (line,) = [line for line in generate(tmp_path).splitlines() if "partial, fixed-48" in line]
    assert f"| {partial:.2f}× |" in line
    capfd.readouterr()
    with pytest.raises(SystemExit):
        step_times.main([*words, "--seed", "1"])
    assert "measured with other settings" in capfd.readouterr().err
