"""`sparrow bench rollout`: the replay on real engines, and the command."""

import asyncio
from typing import Any

import pytest
from engines import start_engine

from sparrow_sglang.benchmarks.rollout import Request, make_requests, replay


async def abort_once_running(manager: Any) -> None:
    while not manager.rid_to_state:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    manager.abort_request(abort_all=True)


def test_every_sequence_runs_to_its_own_length(tiny_qwen3: str) -> None:
    lengths = [1, 200, 17, 64, 3, 90, 16, 40]
    requests = make_requests(lengths, [list(range(40))])
    with start_engine(
        tiny_qwen3,
        attention_backend="sparrow",
        sparrow_schedule="fixed-64",
        page_size=16,
        incremental_streaming_output=True,
    ) as engine:
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
