"""Requests that end SGLang's scheduler, or that it answers wrongly, get status 400 and one line."""

import json
import re
import threading
from typing import Any

import httpx
import pytest
from servers import running_requests
from waiting import wait_until

PROMPT = [5] * 40
SAMPLING = {"max_new_tokens": 2, "ignore_eos": True}
RIGHT = {"input_ids": PROMPT, "sampling_params": SAMPLING}
LOGPROBS = {"return_logprob": True}


def refused(client: httpx.Client, route: str, body: dict[str, Any]) -> str:
    """The error of a request; the server goes on serving others."""
    # httpx itself does not write what only Python's JSON has.
    json_type = {"content-type": "application/json"}
    response = client.post(route, content=json.dumps(body), headers=json_type)
    answered = client.post("/generate", json=RIGHT)
    assert answered.json()["meta_info"]["completion_tokens"] == 2
    assert response.status_code == 400, response.text[:300]
    message: str = response.json()["error"]["message"]
    return message


BAD_FIELDS: list[dict[str, Any]] = [
    {"input_ids": [[]]},
    LOGPROBS | {"logprob_start_len": [3]},
    LOGPROBS | {"top_logprobs_num": 257},
    # Too long by a little: an answer without the lists that an audit asks for.
    {"input_ids": [5] * 4091},
    {"routed_experts_start_len": -5},
    {"positional_embed_overrides": 5},
    {"extra_key": ["a"]},
    {"lora_id": "a"},
    {"priority": 2**40},
    {"session_params": {"id": []}},
    {"input_ids": [[5]] * 100, "sampling_params": {"n": 1000, "max_new_tokens": 1}},
]
BAD_PARAMETERS: list[dict[str, Any]] = [
    {"logit_bias": {"11": "NaN"}},
    {"min_new_tokens": 2, "stop_token_ids": [2**26]},
    {"temperature": 1e39},
    {"stream_interval": 0},
    {"n": None},
    {"sparrow": {"dense": True}},
    {"stop_regex": "("},
    {"stop_regex": ["(?:.?.?.?.?.?){30}\0"] * 3},
    {"stop_regex": "(" * 2000 + "a" + ")" * 2000},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: str(fields)[:60])
def test_fields(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert_named(next(reversed(fields)), refused(client, "/generate", RIGHT | fields))


@pytest.mark.parametrize("parameters", BAD_PARAMETERS, ids=str)
def test_sampling_parameters(client: httpx.Client, parameters: dict[str, Any]) -> None:
    body = RIGHT | {"sampling_params": SAMPLING | parameters}
    assert_named(next(reversed(parameters)), refused(client, "/generate", body))


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/generate", {"text": 5}, "text=5: Input should be a valid string; text=5: Input should"),
        ("/v1/completions", {"model": "tiny"}, "prompt: Field required"),
        ("/pause_generation", {"mode": "x"}, "mode='x': Input should be 'abort', 'retract' or "),
        ("/generate", {"input_ids": "ab" * 10**6}, "input_ids='abab"),
        (
            "/generate",
            {"sampling_params": [1] * 9},
            "sampling_params.3=1: Input should be",
        ),
    ],
)
def test_types(client: httpx.Client, route: str, body: dict[str, Any], said: str) -> None:
    """Errors name fields and values, and none of the server's files."""
    answer = client.post(route, json=body)
    content = answer.json()
    message = content.get("error", content)["message"]
    assert (answer.status_code, content.get("error", content)["code"]) == (400, 400)
    assert said in message and message.isprintable() and len(message) < 1100
    assert "/" not in message and "loc" not in message


def test_a_pattern_ends_a_response(client: httpx.Client) -> None:
    """At the first token with which the text has a match. `re` would try the first for hours."""
    fields = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    whole = client.post("/generate", json=RIGHT | {"sampling_params": fields}).json()["text"]
    tokens = whole.split()
    for pattern in (rf"{tokens[9]}\s+\b(?:{tokens[10]})$", r"(\w+ ){5,}?\w*2"):
        ends = (number for number in range(40) if re.search(pattern, " ".join(tokens[:number])))
        parameters = fields | {"stop_regex": [r"(\w+\s?)+!", pattern], "no_stop_trim": True}
        answer = client.post("/generate", json=RIGHT | {"sampling_params": parameters}).json()
        reason = answer["meta_info"]["finish_reason"]
        assert answer["text"].split() == tokens[: next(ends)]
        assert reason == {"type": "stop", "matched": pattern}


def assert_named(field: str, message: str) -> None:
    """The message names the field, unless it is SGLang's own or of a message as a whole."""
    named = {"input_ids": "tokens", "sampling_params": "n=", "session_params": "[]"}
    others = ("logit_bias", "max_new_tokens", "top_k", "stop_regex")
    assert field in others or field in message or named.get(field, field) in message, message


def test_a_client_that_leaves_ends_no_request_but_its_own(client: httpx.Client) -> None:
    """Ids that begin all ids which SGLang makes."""
    long = {"sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    answers: list[dict[str, Any]] = []

    def generate() -> None:
        answers.append(client.post("/generate", json={"input_ids": PROMPT} | long).json())

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    ids = list("0123456789abcdef")
    body = {"input_ids": [[5]] * 16, "rid": ids, "stream": True} | long
    with client.stream("POST", "/generate", json=body) as stream:
        next(stream.iter_lines())
    for thread in threads:
        thread.join()
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == ["length"] * 3
    wait_until(lambda: not running_requests(client))


def test_empty_items_to_score(client: httpx.Client) -> None:
    body = {"model": "tiny", "query": [], "items": [[]], "label_token_ids": [5]}
    assert "expected one token or more" in refused(client, "/v1/score", body)
