"""Requests that end SGLang's scheduler, or that it answers wrongly, get status 400 and one line."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from adapted_models import save_model_of_words
from servers import start_server

PROMPT = [5] * 40
SAMPLING = {"max_new_tokens": 2, "ignore_eos": True}
RIGHT = {"input_ids": PROMPT, "sampling_params": SAMPLING}
WORDS = [{"role": "user", "content": "w5 w6"}]
OPTION = {"dense": True}
LOGPROBS = {"return_logprob": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        start_server(
            save_model_of_words(tmp_path_factory.mktemp("words")),
            skip_tokenizer_init=False,
            grammar_backend="none",
            attention_backend="sparrow",
            sparrow_schedule="fixed-64",
            served_model_name="tiny",
            log_level="critical",
        ) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def refused(client: httpx.Client, route: str, body: dict[str, Any]) -> str:
    """The error of a request; the server goes on serving others."""
    # httpx itself does not write what only Python's JSON has.
    json_type = {"content-type": "application/json"}
    response = client.post(route, content=json.dumps(body), headers=json_type)
    answered = client.post("/generate", json=RIGHT)
    assert answered.json()["meta_info"]["completion_tokens"] == 2
    assert response.status_code == 400, response.text[:300]
    content = response.json()
    error = content.get("error", content)
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_ids": [[]]}, "input_ids=[]: expected one token or more in every prompt"),
        ({"input_ids": [[5, 6], []]}, "input_ids=[]: expected one token or more"),
        ({"input_ids": [5, 256]}, "input_ids[1]=256: expected token ids of the model from 0 to 25"),
        ({"input_ids": [-1]}, "input_ids[0]=-1: expected token ids"),
        (LOGPROBS | {"logprob_start_len": -5}, "logprob_start_len=-5: expected a position in the"),
        (LOGPROBS | {"logprob_start_len": [3]}, "logprob_start_len=[3]: expected `int`, got `ar"),
        (LOGPROBS | {"top_logprobs_num": 257}, "top_logprobs_num=257: expected a whole number"),
        ({"routed_experts_start_len": -5}, "routed_experts_start_len=-5: expected a position"),
        ({"positional_embed_overrides": 5}, "positional_embed_overrides=5: expected"),
        ({"extra_key": ["a"]}, "extra_key"),
        ({"lora_id": "a"}, "lora_id='a': SGLang sets it; expected the name of an adapter in lora"),
        ({"priority": 2**40}, "priority=1099511627776: expected a whole number from -2147483648"),
    ],
    ids=str,
)
def test_fields(client: httpx.Client, fields: dict[str, Any], reason: str) -> None:
    assert reason in refused(client, "/generate", RIGHT | fields)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"logit_bias": {"11": 1e39}}, "logit_bias['11']=1e+39: expected a number from -1e+20 to"),
        ({"logit_bias": {"11": "NaN"}}, ""),
        ({"min_new_tokens": 2, "stop_token_ids": [2**26]}, "stop_token_ids[0]=67108864: expected"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]=-1: expected token ids of the model"),
        ({"top_k": 2**31}, "top_k=2147483648: expected a whole number from -2147483648 to 214748"),
        ({"temperature": 1e39}, "temperature=1e+39: expected a number from -3.4"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46: expected a number from 1e-06"),
        ({"stream_interval": 0}, "stream_interval=0: expected a whole number from 1 to"),
        ({"max_new_tokens": 1.5}, ""),
        ({"n": 0}, "n=0: expected a whole number from 1 to 1024"),
        ({"n": 30_000}, "n=30000: expected a whole number from 1 to 1024"),
        ({"stop_regex": "("}, "the request cannot be read"),
    ],
    ids=str,
)
def test_sampling_parameters(client: httpx.Client, parameters: dict[str, Any], reason: str) -> None:
    body = RIGHT | {"sampling_params": SAMPLING | parameters}
    assert reason in refused(client, "/generate", body)


def test_empty_items_to_score(client: httpx.Client) -> None:
    body = {"model": "tiny", "query": [], "items": [[]], "label_token_ids": [5]}
    assert "expected one token or more" in refused(client, "/v1/score", body)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", RIGHT | {"sparrow": OPTION}),
        ("/generate", RIGHT | {"custom_params": {"sparrow": OPTION}}),
        ("/generate", {"text": "w5", "sampling_params": {"sparrow": OPTION}}),
        ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "sparrow": OPTION}),
        ("/v1/chat/completions", {"model": "tiny", "messages": WORDS, "sparrow": OPTION}),
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": WORDS,
                "extra_body": {"custom_params": {"sparrow": OPTION}},
            },
        ),
        ("/invocations", {"model": "tiny", "messages": WORDS, "sparrow": OPTION}),
        # SGLang drops custom_params here.
        ("/v1/responses", {"model": "tiny", "input": "w5", "custom_params": {"sparrow": OPTION}}),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "messages": WORDS,
                "max_tokens": 2,
                "custom_params": {"sparrow": OPTION},
            },
        ),
        ("/api/generate", {"model": "tiny", "prompt": "w5", "custom_params": {"sparrow": OPTION}}),
    ],
    ids=str,
)
def test_an_option_in_a_place_where_nobody_reads_it(
    client: httpx.Client, route: str, body: dict[str, Any]
) -> None:
    said = refused(client, route, body)
    right = 'sampling_params["custom_params"]' if route == "/generate" else '"custom_params"'
    assert "sparrow" in said and right in said


def test_words_in_a_prompt_are_no_option(client: httpx.Client) -> None:
    body = {"text": 'w5 "sparrow" w6', "sampling_params": SAMPLING}
    assert client.post("/generate", json=body).status_code == 200
