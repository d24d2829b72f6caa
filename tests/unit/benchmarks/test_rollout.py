"""`sparrow bench rollout` without an engine: lengths, requests, options, a side that fails."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.benchmarks import common, rollout
from sparrow_sglang.benchmarks.rollout import synthetic_lengths
from sparrow_sglang.commands import cli


@pytest.mark.parametrize(("count", "mean"), [(8, 1), (16, 500), (64, 8192), (128, 30000)])
def test_synthetic_lengths_have_their_mean_and_stop_at_the_cut_off(count: int, mean: int) -> None:
    lengths = synthetic_lengths(count, mean, 32768, seed=1)
    assert len(lengths) == count
    assert statistics.mean(lengths) == pytest.approx(mean, abs=0.5)
    assert 1 <= min(lengths) and max(lengths) <= 32768
    again = synthetic_lengths(count, mean, 32768, seed=2)
    assert sorted(again) == sorted(lengths)
    assert mean == 1 or again != lengths


@pytest.mark.parametrize("fails", [True, False])
def test_what_was_measured_survives_a_side_that_fails(
    fails: bool,
    tiny_qwen3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_side(_: Any, model: Any, side: common.Side, options: Any) -> bool:
        if fails and not side.schedule:
            return False
        row = {"model": model.name, "backend": side.backend, "schedule": side.schedule}
        row |= {"first_token_last_s": 1.0}
        common.add_row(options.out, row | {"tokens_per_s": 4.0 if side.schedule else 2.0})
        return True

    monkeypatch.setattr(rollout, "in_fresh_process", run_side)
    out = tmp_path / "rollout.json"
    words = ["bench", "rollout", "--model-path", tiny_qwen3, "--schedule", "fixed-64"]
    words += "--sequences 8 --mean-tokens 40 --max-tokens 120 --prompt-tokens 48".split()
    assert cli.main([*words, "--out", str(out)]) == int(fails)
    content = json.loads(out.read_text())
    assert content["settings"]["acceptance_rate"] is None  # nothing is assumed of real weights
    assert [row["backend"] for row in content["rows"]] == ["sparrow", "torch_native"][: 2 - fails]
    faster = "1.00x as fast as dense to the first tokens, 2.00x to the last one"
    assert (faster in capsys.readouterr().out) != fails
