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
    """Sides are compared with the faster one of stock."""
    speeds = {"sparrow": 4.0, "stock": 2.5, "stock-16": 2.0, "ngram": 5.0}

    def run_side(_: Any, side: common.Side, options: Any, measured: rollout.Rollouts) -> bool:
        if fails and side.name == "stock":
            return False
        row = {"side": side.name, "schedule": side.schedule, "sequences": 16}
        row |= {"first_token_last_s": 1.0, "tokens_per_s": speeds[side.name]}
        common.add_row(options.out, row | {"assumed": measured.acceptance})
        return True

    monkeypatch.setattr(common, "in_fresh_process", run_side)
    out, prompts = tmp_path / "rollout.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [3, 4]}\n{"input_ids": [5]}\n')
    words = ["bench", "rollout", "--model-path", tiny_qwen3, "--schedule", "fixed-64"]
    words += ["--sequences", "16", "--prompts", str(prompts), "--sides", *speeds]
    assert cli.main([*words, "stock-8", "--out", str(out)]) == 2
    refusal = capsys.readouterr().err
    assert "--sides stock-8: expected some of sparrow, stock, " in refusal and "fa3" in refusal
    assert not out.exists()
    words.append("sparrow")  # is measured once
    assert cli.main([*words, "--out", str(out)]) == int(fails)
    content = json.loads(out.read_text())
    assert content["settings"]["acceptance_rate"] is None  # nothing is assumed of real weights
    measured = [row["side"] for row in content["rows"]]
    assert measured == [side for side in speeds if not (fails and side == "stock")]
    gains = ["2.00x", "1.00x", "2.50x"] if fails else ["1.60x", "1.00x", "0.80x", "2.00x"]
    printed = capsys.readouterr().out.splitlines()[-len(gains) :]
    assert [line.split()[-1] for line in printed] == gains


def test_real_weights_answer_other_prompts_in_each_set(tiny_qwen3: str, tmp_path: Path) -> None:
    prompts, model = tmp_path / "prompts.jsonl", Path(tiny_qwen3)
    prompts.write_text("".join(f'{{"input_ids": [{i}]}}\n' for i in range(3, 10)))
    words = ["--model-path", tiny_qwen3, "--prompts", str(prompts), "--sequences", "1", "20"]
    options = rollout._parser().parse_args([*words, "--max-tokens", "9"])
    one, twenty = rollout.rollouts(options, model, {"max_position_embeddings": 64})
    assert [[request.prompt for request in each] for each in one] == [[[i]] for i in range(3, 8)]
    assert [len(each) for each in twenty] == [20, 20]
    assert [request.prompt[0] for request in twenty[1]] == [6] * 8 + [7] * 8 + [8] * 4
    assert all(request.ends and request.new_tokens == 9 for request in twenty[0])
    texts = [json.loads(line)["messages"][0]["content"] for line in rollout.PROMPTS.open()]
    assert len(set(texts)) == 24
