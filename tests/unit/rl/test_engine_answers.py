"""What a rollout takes from an engine's answers, and the buckets that weights travel in."""

import math

import pytest
import torch
from training import PROMPTS

from sparrow_sglang.rl.engines.buckets import pack
from sparrow_sglang.rl.rollout import RolloutError, Sampling, sample_request, to_group

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


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"weight_version": "2"}, "weight_version='2': expected '3'"),
        ({"finish_reason": {"type": "abort", "message": "gone"}}, "'abort': gone"),
        ({"completion_tokens": 5}, "2 log-probs for 5 tokens"),
        ({"output_token_logprobs": [], "completion_tokens": 0}, "0 tokens"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(meta, message) -> None:
    sampling = Sampling(max_new_tokens=2)
    good = answer([5, 6])
    group = to_group(PROMPTS[0], [good], sampling, "3", "dense")
    assert group.rollouts[0].response_ids == (5, 6)
    with pytest.raises(RolloutError, match=message):
        to_group(PROMPTS[0], [good, answer([5, 6], **meta)], sampling, "3", "dense")


def test_a_response_cut_short_by_a_small_pool_is_refused() -> None:
    with pytest.raises(RolloutError, match="max_total_tokens"):
        to_group(PROMPTS[0], [answer([5, 6])], Sampling(max_new_tokens=3), "3", "dense")


def test_requests_leave_no_truncation_to_the_checkpoint() -> None:
    parameters = sample_request(PROMPTS[0], SAMPLING)["sampling_params"]
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
        assert bucket.data.numel() <= 100 or len(bucket.names) == 1
        start = 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            size = math.prod(shape) * bucket.dtype.itemsize
            unpacked[name] = bucket.data[start : start + size].view(bucket.dtype).view(shape)
            start += size
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(unpacked[name], tensor, rtol=0, atol=0)
