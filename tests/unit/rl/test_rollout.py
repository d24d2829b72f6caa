"""Responses from an engine's outputs, and the buckets in which weights are sent."""

import asyncio
import math
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from training import PROMPTS

from sparrow_sglang.rl.engines import local_engine
from sparrow_sglang.rl.engines.local_engine import LocalEngine, pack, response_text
from sparrow_sglang.rl.rollout import EngineDied, RolloutError, Sampling, sample_request, sampled
from sparrow_sglang.rl.tasks import math as math_task
from sparrow_sglang.rl.types import Prompt, Rollout

SAMPLING = Sampling(max_new_tokens=60)


def answer(ids: list[int], **meta) -> dict:
    logprobs = [(-1.0, token, None) for token in ids]
    base = {
        "output_token_logprobs": logprobs,
        "completion_tokens": len(ids),
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "3",
    }
    return {"meta_info": base | meta}


def test_thinking_markers_that_are_special_tokens_are_in_the_text() -> None:
    symbols = ["<think>", "</think>", "<|im_end|>", r"maybe \boxed{12}", " or not"]
    special = {
        number: SimpleNamespace(content=symbol, special=True)
        for number, symbol in enumerate(symbols[:3])
    }
    tokenizer = SimpleNamespace(
        added_tokens_decoder=special,
        decode=lambda ids, skip_special_tokens=False: "".join(
            symbols[number] for number in ids if not (skip_special_tokens and number in special)
        ),
    )

    def reward(ids: list[int]) -> float:
        said = answer(ids, finish_reason={"type": "stop", "matched": 2})
        decode = partial(response_text, tokenizer)
        rollout = sampled(PROMPTS[0], 0, said, SAMPLING, "3", "dense", decode)
        return math_task.reward(Prompt("p", "math", (1,), {"answer": "12"}), rollout.text)

    assert (reward([0, 3, 4, 2]), reward([0, 4, 1, 3, 2])) == (0, 1)


def taken(said: dict, sampling: Sampling) -> Rollout:
    return sampled(PROMPTS[0], 0, said, sampling, "3", "dense", str)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"weight_version": "2"}, "weight_version='2': expected '3'"),
        ({"finish_reason": {"type": "abort", "message": "gone"}}, "'abort': gone"),
        ({"completion_tokens": 5}, "2 log-probs for 5 tokens"),
        ({"output_token_logprobs": [], "completion_tokens": 0}, "0 tokens"),
        ({"output_token_logprobs": [(math.nan, 5, None)] * 2}, "not finite"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(meta, message) -> None:
    sampling = Sampling(max_new_tokens=2)
    rollout = taken(answer([5, 6]), sampling)
    assert rollout.response_ids == (5, 6)
    with pytest.raises(RolloutError, match=message):
        taken(answer([5, 6], **meta), sampling)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_retracted_response_is_known_as_such(count) -> None:
    sampling = Sampling(max_new_tokens=2)
    assert taken(answer([5, 6], num_retractions=count), sampling).retracted == (count > 0)


def test_requests_leave_no_truncation_to_the_checkpoint() -> None:
    parameters = sample_request((1,), SAMPLING)["sampling_params"]
    expected = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert {key: parameters[key] for key in expected} == expected


def test_buckets_hold_every_tensor_once_and_bound_the_memory() -> None:
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(1).bfloat16(),
        "d": torch.randn(40, 2),
        "e": torch.randn(2, 2).t(),
    }
    unpacked = {}
    for bucket in pack(tensors.items(), bucket_bytes=100):
        assert bucket.get_flattened_tensor().nbytes <= 100 or len(bucket.get_metadata()) == 1
        unpacked |= dict(bucket.reconstruct_tensors())
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(unpacked[name], tensor, rtol=0, atol=0)


def test_an_engine_that_does_not_answer_a_call_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_engine, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(local_engine, "POLL_S", 0.05)
    engine = LocalEngine.__new__(LocalEngine)
    loop = asyncio.new_event_loop()
    engine.engine = SimpleNamespace(loop=loop)
    engine._processes = cast(Any, SimpleNamespace(require_alive=lambda: None))
    with pytest.raises(EngineDied):
        engine._run(asyncio.sleep(60))
    assert engine._run(asyncio.sleep(0.07, "answered")) == "answered"
    loop.close()
