"""A server with lossless decoding, by the `openai` client, against a stock one."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from adapted_models import save_model_of_words, token_ids, words
from engines import random_prompt, sparse
from servers import exported, sparrow_metrics, start_server

DASHBOARD = Path(__file__).parents[2] / "examples" / "openai_server" / "grafana.json"
PROMPT = words(random_prompt(0, 100))
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs: lossless, and stock."""
    model = save_model_of_words(tmp_path_factory.mktemp("words"))
    common = {"skip_tokenizer_init": False, "grammar_backend": "none", "served_model_name": "tiny"}
    with (
        start_server(
            model,
            **sparse("fixed-64"),
            speculative_algorithm="SPARROW",
            speculative_num_draft_tokens=5,
            enable_metrics=True,
            **common,
        ) as lossless,
        start_server(model, attention_backend="torch_native", **common) as stock,
    ):
        yield lossless, stock


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def answer(url: str, **fields: Any) -> Any:
    return client(url).completions.create(prompt=PROMPT, **GREEDY | fields)


def test_answers_are_those_of_a_stock_server(served: tuple[str, str]) -> None:
    """Whole, streamed, in chats, and where a string stops them within a round."""
    expected = answer(served[1]).choices[0].text
    ours = answer(served[0], n=2)
    assert [choice.text for choice in ours.choices] == [expected] * 2
    parts = [part.choices[0].text for part in answer(served[0], stream=True)]
    assert "".join(parts) == expected and len(parts) > 2
    messages = [{"role": "user", "content": PROMPT}]
    chats = [client(url).chat.completions.create(messages=messages, **GREEDY) for url in served]
    assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
    # Later stops of the same round hide neither earlier strings nor earlier tokens.
    tokens = token_ids(expected)
    for token, later in pairwise(tokens[5:12]):
        stops: tuple[dict[str, Any], ...] = (
            {"stop": [f"w{later} ", f"w{token} "]},
            {"stop": f"w{later} ", "extra_body": {"stop_token_ids": [token]}},
            {"extra_body": {"stop_regex": [rf"w{later}\s", rf"w{token}\s"]}},
        )
        for fields in stops:
            ours, stock = (answer(url, **fields) for url in served)
            assert ours.choices[0].model_dump() == stock.choices[0].model_dump()
            assert ours.choices[0].finish_reason == "stop"
            assert ours.usage.completion_tokens == stock.usage.completion_tokens


def test_drafts_are_counted(served: tuple[str, str]) -> None:
    """The ratio of two counters estimates the mean acceptance rate along answers."""
    before, rounds, accepted = counters(served[0]), 0, 0
    for tokens in (11, 12, 13, 14):
        body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
        meta = httpx.post(f"{served[0]}/generate", json=body, timeout=60).json()["meta_info"]
        rounds += meta["spec_verify_ct"]
        accepted += sum(n * count for n, count in enumerate(meta["spec_correct_drafts_histogram"]))
    now = counters(served[0])
    drafted, judged, counted = (now[name] - before[name] for name in before)
    # A round may be launched before the one that ends the request is known.
    assert 0 < counted == accepted < judged <= 4 * rounds
    assert 3 * rounds <= drafted <= 4 * (rounds + 4)
    found = exported(served[0])
    kinds = {name: labels.pop("kind", None) for name, labels in found.items() if "draft" in name}
    names = re.findall(r"sparrow\[:_\](\w*draft\w*)", DASHBOARD.read_text("utf-8"))
    for name in names:
        assert found[f"sparrow:{name}"] == found["sglang:spec_accept_length"]
        assert kinds[f"sparrow:{name}"] == (None if "per_round" in name else {"sparse", "lookup"})
    assert len(set(names)) == 4
    gauges = [v for name, v in sparrow_metrics(served[0]).items() if "drafts_per_round" in name]
    assert len(gauges) == 1 and gauges[0] in (3, 4)


def test_a_report_counts_drafts(served: tuple[str, str]) -> None:
    """By the client of docs/serving.md, whole and streamed."""
    option = {"kv_budget_tokens": 64, "report": True}
    before = counters(served[0])
    answers = [
        answer(served[0], extra_body={"custom_params": {"sparrow": option}}),
        [*answer(served[0], stream=True, extra_body={"custom_params": {"sparrow": option}})][-1],
    ]
    first, second = (each.metadata["sparrow"][0] for each in answers)
    for report in (first, second):
        assert report["kv_budget_tokens"] == 64
        assert 3 * report["rounds"] <= report["drafts"] <= 4 * report["rounds"]
        # The first token comes out of prefill, and the last round may accept more than is returned.
        assert 39 <= report["rounds"] + report["accepted_drafts"] <= 39 + 4
    accepted = counters(served[0])["accepted_drafts"] - before["accepted_drafts"]
    assert accepted == first["accepted_drafts"] + second["accepted_drafts"]


def counters(url: str) -> dict[str, float]:
    metrics = sparrow_metrics(url).items()
    names = ("drafted_tokens", "drafts", "accepted_drafts")
    return {
        name: sum(value for found, value in metrics if found.startswith(f"sparrow:{name}_total{{"))
        for name in names
    }


def test_what_a_round_cannot_honour_is_a_bad_request(served: tuple[str, str]) -> None:
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        answer(served[0], presence_penalty=1)


def test_a_session_goes_on_after_what_was_returned(served: tuple[str, str]) -> None:
    """Not after the tokens that its last round accepted past the end."""

    def post(url: str, route: str, **body: Any) -> Any:
        return httpx.post(f"{url}/{route}", json=body, timeout=60).json()

    def turns(url: str, stop: int) -> tuple[list[int], list[int]]:
        session = {"id": post(url, "open_session", capacity_of_str_len=10_000)}
        fields: dict[str, Any] = {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [stop]}
        first, second = (random_prompt(seed, 20) for seed in (1, 2))
        turn = post(
            url, "generate", input_ids=first, session_params=session, sampling_params=fields
        )
        session["rid"] = turn["meta_info"]["id"]
        later = post(
            url, "generate", input_ids=second, session_params=session, sampling_params=fields
        )
        return turn["output_ids"], later["output_ids"]

    whole, _ = turns(served[1], 255)
    for stop in whole[2:8]:
        assert turns(served[0], stop) == turns(served[1], stop)
