"""`sparrow bench rollout`: the lengths, the replay on real engines, and the command."""

import asyncio
import json
import math
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_lines import refusal
from engines import start_engine

from sparrow_sglang.benchmarks.result_files import RESULTS
from sparrow_sglang.benchmarks.rollouts import rollout_replay
from sparrow_sglang.benchmarks.rollouts.lengths import SIGMA, synthetic_lengths
from sparrow_sglang.benchmarks.rollouts.requests import Request, make_requests, replay
from sparrow_sglang.benchmarks.tables import generate
from sparrow_sglang.commands import cli

SMALL = ["--sequences", "8", "--mean-tokens", "40", "--max-tokens", "120", "--prompt-tokens", "48"]


# -- lengths


@pytest.mark.parametrize(("count", "mean"), [(8, 1), (16, 500), (64, 8192), (128, 30000)])
def test_synthetic_lengths_have_their_mean_and_stop_at_the_cut_off(count: int, mean: int) -> None:
    lengths = synthetic_lengths(count, mean, 32768, seed=1)
    assert len(lengths) == count
    assert statistics.mean(lengths) == pytest.approx(mean, abs=0.5)
    assert 1 <= min(lengths) and max(lengths) <= 32768
    again = synthetic_lengths(count, mean, 32768, seed=2)
    assert sorted(again) == sorted(lengths)
    assert mean == 1 or again != lengths


def test_synthetic_lengths_follow_the_cut_off_log_normal_law() -> None:
    lengths = np.sort(synthetic_lengths(4000, 8192, 32768, seed=0))
    # Draws of the law itself, about the same median; the cut-off takes what lies above it.
    draws = np.random.default_rng(0).lognormal(math.log(np.median(lengths)), SIGMA, 400_000)
    draws = np.minimum(draws, 32768)
    assert draws.mean() == pytest.approx(8192, rel=0.01)
    quantiles = [0.01, 0.1, 0.5, 0.9, 0.97, 0.99]
    np.testing.assert_allclose(
        np.quantile(lengths, quantiles), np.quantile(draws, quantiles), rtol=0.02
    )
    assert np.mean(lengths == 32768) == pytest.approx(np.mean(draws == 32768), rel=0.05)


# -- requests and the replay


def test_eight_sequences_share_a_prompt() -> None:
    requests = make_requests(list(range(1, 21)), prompt_tokens=32, vocab_size=50, seed=3)
    assert [request.new_tokens for request in requests] == list(range(1, 21))
    prompts = [request.prompt for request in requests]
    assert all(len(prompt) == 32 and set(prompt) <= set(range(50)) for prompt in prompts)
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        assert all(prompt == prompts[start] for prompt in prompts[start:stop])
    assert prompts[0] != prompts[8] != prompts[16]


async def abort_once_running(manager: Any) -> None:
    while not manager.rid_to_state:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    manager.abort_request(abort_all=True)


def test_every_sequence_runs_to_its_own_length(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparrow_sglang.benchmarks.rollouts.requests.SAMPLE_S", 0.05)
    lengths = [1, 200, 17, 64, 3, 90, 16, 40]
    requests = make_requests(lengths, prompt_tokens=40, vocab_size=256, seed=0)
    with start_engine(
        tiny_qwen3, attention_backend="sparrow", sparrow_schedule="fixed-64", page_size=16
    ) as engine:
        result = replay(engine, requests)
        engine.loop.create_task(abort_once_running(engine.tokenizer_manager))
        with pytest.raises(RuntimeError, match=r"sequence 0 ended with \d+ tokens instead of 4000"):
            replay(engine, [Request(requests[0].prompt, 4000)])
    assert (result["sequences"], result["prompt_tokens"]) == (8, 320)
    assert (result["output_tokens"], result["longest"]) == (sum(lengths), 200)
    assert result["tokens_per_s"] == pytest.approx(sum(lengths) / result["seconds"])
    # The longest ends last, and no sooner than the clock says.
    assert max(result["ended_s"]) == result["ended_s"][1] <= result["seconds"]
    curve = result["curve"]
    assert len(curve) >= 3
    for key in ("s", "tokens"):
        values = [point[key] for point in curve]
        assert values == sorted(values)
    last = curve[-1]
    assert (last["s"], last["tokens"]) == (result["seconds"], sum(lengths))
    assert (last["running"], last["unfinished"]) == (0, 0)
    # The rates, over the time that each stands for, are all the tokens.
    starts = [0.0, *(point["s"] for point in curve)]
    spans = [point["s"] - start for point, start in zip(curve, starts, strict=False)]
    total = sum(p["tokens_per_s"] * span for p, span in zip(curve, spans, strict=True))
    assert total == pytest.approx(sum(lengths))
    for point in curve:
        ended = sum(end <= point["s"] for end in result["ended_s"])
        assert point["unfinished"] == len(lengths) - ended
        assert point["running"] <= point["unfinished"]


# -- the command


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs each side here, on a forked engine, instead of half a minute of imports; their names."""
    sides: list[str] = []

    def run(command: list[str]) -> "subprocess.CompletedProcess[bytes]":
        assert command[1:3] == ["-m", rollout_replay.MODULE]
        sides.append(command[command.index("--one") + 1])
        return subprocess.CompletedProcess(command, rollout_replay.main(command[3:]))

    def engine(model_path: str, **arguments: Any) -> Any:
        return start_engine(model_path, **arguments)

    monkeypatch.setattr(rollout_replay, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr("sglang.Engine", engine)
    return sides


def test_both_sides_serve_the_same_requests_and_come_into_one_file(
    tiny_qwen3: str, tmp_path: Path, in_this_process: list[str]
) -> None:
    out = tmp_path / RESULTS / "cpu" / "rollout.json"
    words = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SMALL, "--out", str(out)]
    assert cli.main(["bench", "rollout", *words]) == 0
    assert in_this_process == ["sparse", "dense"]
    assert [path.name for path in out.parent.iterdir()] == ["rollout.json"]
    result = json.loads(out.read_text())
    sparse, dense = result["rows"]
    assert [sparse["backend"], dense["backend"]] == ["sparrow", "torch_native"]
    assert [sparse["schedule"], dense["schedule"]] == ["fixed-64", None]
    for row in (sparse, dense):
        assert row["output_tokens"] == sum(result["settings"]["lengths"])
        assert row["longest"] == max(result["settings"]["lengths"])
        assert row["curve"][-1]["tokens"] == row["output_tokens"]
    speedup = sparse["tokens_per_s"] / dense["tokens_per_s"]
    assert result["compared"]["speedup"] == pytest.approx(speedup)
    assert {"device", "packages", "commit", "command"} <= set(result)
    mean = sparse["output_tokens"] / 8
    assert (
        f"| {Path(tiny_qwen3).name} | fixed-64 | 8 | {mean:,.0f} | {sparse['longest']} |"
        f" {dense['seconds']:.1f} | {sparse['seconds']:.1f} | {dense['tokens_per_s']:,.0f} |"
        f" {sparse['tokens_per_s']:,.0f} | {speedup:.2f}× |"
    ) in generate(tmp_path)


def test_what_was_measured_survives_a_side_that_fails(
    tiny_qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"model": "m", "backend": "sparrow", "schedule": "fixed-64", "tokens_per_s": 4.0}
    row |= {"output_tokens": 8, "seconds": 2.0, "ended_s": [1.0, 2.0]}

    def run(command: list[str]) -> "subprocess.CompletedProcess[bytes]":
        if "dense" in command:
            return subprocess.CompletedProcess(command, 1)
        Path(command[-1]).write_text(json.dumps(row))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(rollout_replay, "subprocess", SimpleNamespace(run=run))
    out = tmp_path / "rollout.json"
    words = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SMALL, "--out", str(out)]
    assert cli.main(["bench", "rollout", *words]) == 1
    result = json.loads(out.read_text())
    assert (result["rows"], result["compared"]) == ([row], None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sequences", "12"], "--sequences 12: expected a multiple of 8"),
        (["--sequences", "0"], "--sequences 0: expected 1 or more"),
        (["--mean-tokens", "500"], "--mean-tokens 500: expected 1 or more, and less than"),
        (["--prompt-tokens", "4050"], "do not fit into the model's context of 4096"),
        (["--engine-args", "[]"], "--engine-args []: expected a JSON object"),
        (
            ["--engine-args", '{"tp_sise": 2}'],
            "--engine-args: tp_sise is no argument of SGLang: did you mean 'tp_size'",
        ),
        (["--schedule", "fixed-60"], "60"),
        (["--dense-backend", "sparrow"], "--dense-backend sparrow: expected a dense backend"),
        (["--lengths-file", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--model-path", "/nowhere"], "--model-path /nowhere: expected the folder"),
    ],
)
def test_nonsense_is_refused_in_one_line_before_an_engine_starts(
    words: list[str],
    message: str,
    tiny_qwen3: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rollout_replay, "subprocess", None)
    usual = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *SMALL]
    assert message in refusal(["bench", "rollout", *usual, *words], capsys)
