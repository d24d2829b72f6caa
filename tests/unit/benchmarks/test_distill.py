"""What `sparrow bench distill` makes of a run's metrics."""

import json
import sys
from pathlib import Path

import pytest

from sparrow_sglang.benchmarks import distill
from sparrow_sglang.benchmarks.distill import row_of


@pytest.mark.parametrize(
    ("scales", "speed"), [([0, 0.5, 1, 0], 35), ([0, 0, 0, 1], None), ([1], None)]
)
def test_the_speed_is_that_of_rollouts_with_the_adapter(scales, speed) -> None:
    """A step chooses the scale of the next one's rollout."""
    steps = [
        {"sparrow/rollout_tokens_per_s": 10 * (1 + i), "sparrow/distill_scale": scale}
        for i, scale in enumerate(scales)
    ]
    row = row_of("lora", [step | {"timing_s/step": 1.0} for step in steps])
    assert row["rollout_tokens_per_s"] == speed
    assert len(row["rollout_tokens_per_s_all"]) == len(scales) - 1


def test_a_run_that_failed_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a program in place of the training, which fails after a step of one delivery."""
    step = '{"timing_s/step": 1, "sparrow/rollout_tokens_per_s": 9, "sparrow/distill_scale": 1}'
    train = tmp_path / "python"
    written = f"echo '{step}' > ${{6#run_dir=}}/metrics.jsonl"
    train.write_text(f"#!/bin/sh\n{written}\n[ ${{10}} = distill.delivery=lora ]")
    train.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(train))
    monkeypatch.setattr(distill, "require_cuda", lambda: None)
    out = tmp_path / "distill.json"
    assert distill.main(["--out", str(out)]) == 1
    assert [row["delivery"] for row in json.loads(out.read_text())["rows"]] == ["lora"]
    assert "merged: failed, left out" in capsys.readouterr().err
