"""`sparrow bench rollout` and `step` on real engines, without a GPU."""

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sglang
from engines import random_prompt, sparse, start_engine
from task_files import jsonl

from sparrow_sglang.benchmarks import common, given_rounds, step
from sparrow_sglang.benchmarks.rollout import Request, make_requests, replay
from sparrow_sglang.commands import cli
from sparrow_sglang.planning.rounds import Plan


async def abort_once_running(manager: Any) -> None:
    while not manager.rid_to_state:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    manager.abort_request(abort_all=True)


def test_every_sequence_runs_to_its_own_length(tiny_qwen3: str) -> None:
    lengths = [1, 200, 17, 64, 3, 90, 16, 40]
    requests = make_requests(lengths, [list(range(40))])
    arguments = sparse("fixed-64") | {"incremental_streaming_output": True}
    with start_engine(tiny_qwen3, **arguments) as engine:
        result = replay(engine, requests)
        engine.loop.create_task(abort_once_running(engine.tokenizer_manager))
        with pytest.raises(RuntimeError, match=r"sequence 0 ended with \d+ tokens instead of 4000"):
            replay(engine, [Request(requests[0].prompt, 4000)])
    assert (result["sequences"], result["prompt_tokens"]) == (8, 320)
    assert (result["output_tokens"], result["longest"]) == (sum(lengths), 200)
    assert result["tokens_per_s"] == pytest.approx(sum(lengths) / result["seconds"])
    assert result["tokens_per_round"] is None
    finished = result["finished_s"]
    assert finished == sorted(finished) and result["seconds"] == finished[-1] > finished[0]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have benchmarks start engines as other tests do, forked from this process."""

    def call(function: Any, *arguments: Any) -> bool:
        function(*arguments)
        return True

    def started(engine_class: Any, model_path: str, **arguments: Any) -> Any:
        return start_engine(model_path, engine_class=engine_class, **arguments)

    plain, given = sglang.Engine, given_rounds.engine_class
    monkeypatch.setattr(common, "in_fresh_process", call)
    monkeypatch.setattr(sglang, "Engine", partial(started, plain))
    monkeypatch.setattr(given_rounds, "engine_class", lambda of: partial(started, given(of)))


@pytest.mark.usefixtures("in_this_process")
def test_rollouts_of_a_model_to_the_ends_of_its_answers(
    tiny_qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU no drafts pay, so rounds are given."""
    take_counts = given_rounds.take_counts

    def give(engine: Any) -> dict[str, Any]:
        given_rounds.set_round(engine, Plan(1, 2, 4))
        return take_counts(engine)

    monkeypatch.setattr(given_rounds, "take_counts", give)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rollout.json"
    jsonl(prompts, [{"input_ids": random_prompt(seed, 40)} for seed in range(3)])
    words = ["bench", "rollout", "--model-path", tiny_qwen3, "--prompts", str(prompts)]
    words += "--sequences 1 10 --max-tokens 20 --drafts 1+2".split()
    assert cli.main([*words, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    measured = [(row["side"], row["page_size"], row["sequences"]) for row in rows]
    sides = (("sparrow", 16), ("stock", 1), ("stock-16", 16))
    assert measured == [(*side, size) for side in sides for size in (1, 10)]
    for row in rows:
        sets = 3 if row["sequences"] == 1 else 1
        assert row["output_tokens"] == 20 * row["sequences"] * sets
        finished = row["finished_s"] if sets > 1 else [row["finished_s"]]
        assert row["seconds"] == pytest.approx(sum(each[-1] for each in finished))
    lossless = rows[1]["rounds"]["sparse+lookups"]
    assert [*rows[1]["rounds"]] == ["sparse+lookups"] and 1 < lossless["tokens_per_round"] <= 4
    # The budget covers such short contexts.
    assert rows[1]["acceptance_rate"] > 0.99 and 0 <= rows[1]["lookup_acceptance"] < 1
    assert not any("rounds" in row for row in rows[2:])


@pytest.mark.usefixtures("in_this_process")
def test_steps_and_rounds_of_random_weights(
    tiny_qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, one after the other in one engine, accept everything and draft what is given."""
    (tmp_path / "models" / "qwen3-4b").mkdir(parents=True)
    shutil.copy(Path(tiny_qwen3, "config.json"), tmp_path / "models" / "qwen3-4b")
    monkeypatch.setattr(common, "MODELS", tmp_path / "models")
    monkeypatch.setattr(common, "require_cuda", lambda: None)
    monkeypatch.setattr(step, "SHORT", 4)
    monkeypatch.setattr(step, "LONG", 22)
    words = "bench step --models qwen3-4b --cases 2x64 --schedules drafts --drafts 2 0+3 1+1"
    arguments = {"max_total_tokens": 2048, "dtype": "float32"}
    words += " --repeats 1 --prefills 1 --acceptance-rate 0.5 --lookup-acceptance 0.25"
    out = tmp_path / "steps.json"
    command = [*words.split(), "--engine-args", json.dumps(arguments), "--out", str(out)]
    assert cli.main(command) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["side"], row["page_size"]) for row in rows[3:]] == [("stock", 1), ("stock-16", 16)]
    rounds = [(row["drafts"], row["lookups"], row["tokens_per_round"]) for row in rows[:3]]
    assert rounds == [(2, 0, 1.75), (0, 3, 1.328125), (1, 1, 1.625)]
    for row in rows:
        assert row["step_ms"] * row.get("tokens_per_round", 1) == pytest.approx(
            row.get("round_ms", row["step_ms"])
        )
        assert row["prefill_s"] > 0 and "device_ms" not in row
