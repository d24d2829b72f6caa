"""Bounds of requests: a field at the edge of its range is served, one beyond is refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
from messages import tokenized

from sparrow_sglang.plugin.launcher.request_checks import (
    _require_logprobs,
    require_samples,
    require_servable,
)
from sparrow_sglang.schedules.options import RequestError

VOCABULARY = 256


def check(fields: dict[str, Any]) -> None:
    require_servable(tokenized(**fields), VOCABULARY, 4096)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": {0, 255}},
        {"top_k": 2**31 - 1, "sampling_seed": 2**63 - 1},
        {"logit_bias": {"11": 1e20}, "repetition_penalty": 2.0},
        {"stop_regex_max_len": 2**40},
        {"logprob_start_len": 3, "top_logprobs_num": 256},
        {"input_ids": [0, 255]},
    ],
    ids=str,
)
def test_edges_are_served(fields: dict[str, Any]) -> None:
    check(fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_token_ids": {5, 256}}, "stop_token_ids.*=256: expected token ids .* 0 to 255"),
        ({"top_k": 2**31}, "top_k=2147483648: expected a whole number from -2147483648 to"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"logit_bias": {"11": 2e20}}, r"logit_bias\['11'\]=2e\+20"),
        ({"repetition_penalty": 1e-7}, "repetition_penalty=1e-07: .* from 1e-06 to 2"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5': expected `int"),
        ({"logprob_start_len": 4}, "logprob_start_len=4: .* from -1 to 3"),
        ({"input_ids": [5, -1]}, r"input_ids\[1\]=-1: expected token ids"),
        ({"input_ids": []}, r"input_ids=\[\]: expected one token or more"),
    ],
    ids=str,
)
def test_what_is_beyond_is_named(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=f"^{expected}"):
        check(fields)


@pytest.mark.parametrize(
    ("prompts", "n", "expected"),
    [
        (1, 1024, None),
        (4, 1024, None),
        (1, 1025, "n=1025: expected a whole number from 1 to 1024"),
        (1, True, "n=True"),
        (1, 0, "n=0: expected a whole number from 1"),
        (5, 1024, "5 prompts with n=1024: expected 4096 samples at most"),
    ],
)
def test_samples_are_bounded(prompts: int, n: Any, expected: str | None) -> None:
    request = SimpleNamespace(text=["a"] * prompts, sampling_params={"n": n})
    if expected is None:
        require_samples(request)
        return
    with pytest.raises(RequestError, match=f"^{expected}"):
        require_samples(request)


def test_top_logprobs_are_bounded_over_all_positions() -> None:
    def check(start: int, listed: int, prompt: int, new: int | None = 1) -> None:
        request: Any = SimpleNamespace(
            top_logprobs_num=listed,
            token_ids_logprob=None,
            logprob_start_len=start,
            return_logprob=True,
            sampling_params=SimpleNamespace(max_new_tokens=new),
        )
        _require_logprobs(request, prompt, 2 * 10**5)

    check(0, 20, 10**6)
    check(-1, 150_000, 10**5)
    check(-1, 40, 10**5, None)
    for start, new in [(0, 1), (-1, 1000), (-1, None)]:
        with pytest.raises(RequestError):
            check(start, 150_000, 10**5, new)
