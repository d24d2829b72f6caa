"""What an audit keeps of requests until it scores them: within bounds, and of one model only."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engines import random_prompt, start_engine, weight_updates

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.plugin.audit import recorded

SECONDS = 60.0
NEW_TOKENS = 60


@pytest.fixture(scope="module")
def engine(sharp_llama: str, schedule_file: str) -> Iterator[Any]:
    arguments = {
        "attention_backend": "sparrow",
        "sparrow_schedule": schedule_file,
        "sparrow_audit_rate": 1.0,
        "chunked_prefill_size": 64,
    }
    with start_engine(sharp_llama, **arguments) as engine:
        yield engine


def requests(count: int, length: int, **more: Any) -> list[dict[str, Any]]:
    parameters = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [
        {"input_ids": random_prompt(seed, length), "sampling_params": parameters, **more}
        for seed in range(count)
    ]


def outcomes(engine: Any, wait_s: float = SECONDS) -> dict[str, int]:
    """What has become of all requests so far, once no audit is left to do or `wait_s` is over."""
    found: dict[str, int] = connect(engine).call_sparrow("audit", wait_s=wait_s)["requests"]
    return {name: found[name] for name in ("audited", "dropped", "failed")}


def since(before: dict[str, int], engine: Any) -> dict[str, int]:
    return {name: count - before[name] for name, count in outcomes(engine).items()}


def test_what_exceeds_the_tokens_that_are_kept_is_dropped(engine: Any, monkeypatch: Any) -> None:
    """Requests are dropped during generation, unnoticed by users; then there is room again."""
    endpoint = connect(engine)
    before = outcomes(engine)
    # The prompts of all four requests fit, and the answers of two.
    monkeypatch.setattr(recorded, "MAX_TOKENS", 4 * 80 + 2 * NEW_TOKENS)
    for _ in range(2):
        for answer in endpoint.generate(requests(4, 80, return_logprob=True, top_logprobs_num=3)):
            meta = answer["meta_info"]
            assert [len(row) for row in meta["output_top_logprobs"]] == [3] * NEW_TOKENS
            assert len(meta["output_token_logprobs"]) == NEW_TOKENS
        found = since(before, engine)
        assert found["dropped"] in (1, 2), found
        assert found["audited"] == 4 - found["dropped"]
        before = outcomes(engine)
    monkeypatch.setattr(recorded, "MAX_TOKENS", 80 + NEW_TOKENS - 1)
    endpoint.generate(requests(1, 80))
    assert since(before, engine) == {"audited": 0, "dropped": 1, "failed": 0}


def test_weights_change_at_once_after_answers_with_audits_queued(
    engine: Any, sharp_llama: str
) -> None:
    """An update, and a check that may overwrite the weights, find the scheduler idle."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    endpoint = connect(engine)
    before = outcomes(engine)
    name = "model.norm.weight"
    weight = torch.tensor(engine.get_weights_by_name(name, 100_000))
    check = CheckWeightsReqInput(action="reset_tensors")
    updates = [lambda: engine.update_weights_from_tensor([(name, weight)])] * 3
    changes = [
        *updates,
        lambda: engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(check)),
        lambda: engine.update_weights_from_disk(sharp_llama),
    ]
    for change in changes:
        endpoint.generate(requests(4, 400))
        with weight_updates(engine) if change in updates else nullcontext():
            assert change()[0]
        # None is left to be scored by the new weights.
        after = outcomes(engine, wait_s=0.0)
        assert after["audited"] + after["dropped"] - before["audited"] - before["dropped"] == 4
        before = after
    assert outcomes(engine) == before
