"""Bounds of requests: a field at the edge of its range is served, one beyond is refused by name."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sparrow_sglang.plugin.launcher.request_checks import (
    _require_logprobs,
    require_samples,
    require_servable,
)
from sparrow_sglang.schedules.options import RequestError

VOCABULARY, PROMPT = 256, [5, 6, 7]


def check(parameters: dict[str, Any], **fields: Any) -> None:
    """Validate the message of a request with these fields."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    given: dict[str, Any] = {"input_text": None, "input_ids": PROMPT, "input_embeds": None}
    given |= {"mm_inputs": None, "stream": False, "top_logprobs_num": 0, "token_ids_logprob": None}
    given |= {"token_type_ids": None, "return_logprob": False, "logprob_start_len": -1}
    sampling = SamplingParams()
    sampling.normalize(None)
    for name, value in parameters.items():
        setattr(sampling, name, value)
    given |= fields
    given["input_ids"] = array("q", given["input_ids"])
    request = TokenizedGenerateReqInput(sampling_params=sampling, **given)
    require_servable(request, VOCABULARY, 4096)


@pytest.mark.parametrize(
    ("parameters", "fields"),
    [
        ({"stop_token_ids": {0, 255}}, {}),
        ({"top_k": 2**31 - 1, "sampling_seed": 2**63 - 1}, {}),
        ({"logit_bias": {"11": 1e20}, "repetition_penalty": 2.0}, {}),
        ({"stop_regex_max_len": 2**40}, {}),
        ({}, {"logprob_start_len": 3, "top_logprobs_num": 256}),
        ({}, {"input_ids": [0, 255]}),
    ],
    ids=str,
)
def test_edges_are_served(parameters: dict[str, Any], fields: dict[str, Any]) -> None:
    check(parameters, **fields)


@pytest.mark.parametrize(
    ("parameters", "fields", "expected"),
    [
        ({"stop_token_ids": {5, 256}}, {}, "stop_token_ids.*=256: expected token ids .* 0 to 255"),
        ({"top_k": 2**31}, {}, "top_k=2147483648: expected a whole number from -2147483648 to"),
        ({"sampling_seed": 2**63}, {}, "sampling_seed"),
        ({"logit_bias": {"11": 2e20}}, {}, r"logit_bias\['11'\]=2e\+20"),
        ({"repetition_penalty": 1e-7}, {}, "repetition_penalty=1e-07: .* from 1e-06 to 2"),
        ({"temperature": float("nan")}, {}, "temperature=nan"),
        ({"max_new_tokens": "5"}, {}, "max_new_tokens='5': expected `int"),
        ({}, {"logprob_start_len": 4}, "logprob_start_len=4: .* from -1 to 3"),
        ({}, {"input_ids": [5, -1]}, r"input_ids\[1\]=-1: expected token ids"),
        ({}, {"input_ids": []}, r"input_ids=\[\]: expected one token or more"),
    ],
    ids=str,
)
def test_what_is_beyond_is_named(
    parameters: dict[str, Any], fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RequestError, match=f"^{expected}"):
        check(parameters, **fields)


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
