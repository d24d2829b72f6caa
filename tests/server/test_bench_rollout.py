"""`sparrow bench rollout`: the replay on real engines, and the command."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engines import start_engine
from small_benchmarks import ROLLOUT

from sparrow_sglang.benchmarks.result_files import RESULTS
from sparrow_sglang.benchmarks.rollouts import turn_prefill
from sparrow_sglang.benchmarks.rollouts.requests import Request, make_requests, replay
from sparrow_sglang.benchmarks.steps import comparison
from sparrow_sglang.benchmarks.steps.comparison import Side
from sparrow_sglang.benchmarks.tables import generate
from sparrow_sglang.commands import cli


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
    # The rates times the spans of time that they stand for add up to all tokens.
    starts = [0.0, *(point["s"] for point in curve)]
    spans = [point["s"] - start for point, start in zip(curve, starts, strict=False)]
    total = sum(p["tokens_per_s"] * span for p, span in zip(curve, spans, strict=True))
    assert total == pytest.approx(sum(lengths))
    for point in curve:
        ended = sum(end <= point["s"] for end in result["ended_s"])
        assert point["unfinished"] == len(lengths) - ended
        assert point["running"] <= point["unfinished"]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run each side here on a forked engine, to save half a minute of imports; returns names."""
    sides: list[str] = []

    def run(function: Any, compared: Any, side: Side, options: Any) -> Any:
        sides.append(side.name)
        return function(compared, side, options)

    def engine(model_path: str, **arguments: Any) -> Any:
        return start_engine(model_path, **arguments)

    monkeypatch.setattr(comparison, "in_new_process", run)
    monkeypatch.setattr("sglang.Engine", engine)
    return sides


def test_both_sides_serve_the_same_requests_and_come_into_one_file(
    tiny_qwen3: str, tmp_path: Path, in_this_process: list[str]
) -> None:
    out = tmp_path / RESULTS / "cpu" / "rollout.json"
    words = ["--model-path", tiny_qwen3, "--schedule", "fixed-64", *ROLLOUT, "--out", str(out)]
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


def test_a_further_turn_prefills_the_sparse_turn_again_and_a_dense_one_the_message_only(
    tiny_qwen3: str, tmp_path: Path, in_this_process: list[str]
) -> None:
    words = f"--model-path {tiny_qwen3} --schedule fixed-64 --sequences 2 --prompt-tokens 128"
    words += (
        f" --turn-tokens 40 100 --message-tokens 10 --repeats 1 --out {tmp_path / 'turns.json'}"
    )
    assert turn_prefill.main(words.split()) == 0
    assert in_this_process == ["sparse", "dense"]
    out = tmp_path / "turns.json"
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert [row["turn_tokens"] for row in rows] == [40, 100, 40, 100]
    for row in rows:
        turn = row["turn_tokens"]
        # The last token of a turn has no KV yet, and whole pages are kept.
        kept = 128 if row["schedule"] else (128 + turn - 1) // 16 * 16
        assert row["cached_tokens"] == kept
        assert row["prefilled_tokens"] == 128 + turn + 10 - kept
        assert 0 < row["prefill_s"] == min(row["prefill_s_all"])
        assert row["generate_s"] > 0
    # A side that has its rows already is not measured again.
    out.write_text(json.dumps(content | {"rows": rows[:2]}))
    assert turn_prefill.main(words.split()) == 0
    assert in_this_process == ["sparse", "dense", "dense"]
    again = json.loads(out.read_text())["rows"]
    assert again[:2] == rows[:2] and [row["turn_tokens"] for row in again[2:]] == [40, 100]
    assert {row["backend"] for row in again[2:]} == {"torch_native"}


def test_conversations_that_the_kv_pool_does_not_hold_are_not_timed(
    tiny_qwen3: str, tmp_path: Path, in_this_process: list[str]
) -> None:
    words = f"--model-path {tiny_qwen3} --schedule fixed-64 --sequences 2 --prompt-tokens 128"
    words += f" --turn-tokens 40 --message-tokens 10 --out {tmp_path / 'turns.json'}"
    # Two sequences of 128 + 40 + 10 tokens need two pages to spare each.
    with pytest.raises(ValueError, match="holds 400 tokens: expected 420 or more"):
        turn_prefill.main([*words.split(), "--engine-args", '{"max_total_tokens": 400}'])
    assert in_this_process == ["sparse"]
