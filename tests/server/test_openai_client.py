"""The official `openai` client, unmodified, against a real server with the backend."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
import openai
import pytest
import torch
from adapted_models import SERVED, save_adapter, save_model_of_words, token_ids, words
from engines import random_prompt
from oracle import FP32, ContractModel
from servers import start_server

from sparrow_sglang import measure_acceptance, push_adapter, score_dense
from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import EndpointError, connect
from sparrow_sglang.schedules.schedule import BudgetSchedule

NAME, KEY = "tiny", "secret"
A, B = BudgetSchedule.fixed(96), BudgetSchedule.fixed(64)
PROMPT = random_prompt(0, 100)
TOKENS = 40
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
WRONG = {"sparrow": {"schedule": "no-such"}}


@dataclass(frozen=True)
class Served:
    """A running server, and the checkpoints that its model names stand for."""

    url: str
    checkpoints: dict[str, str]

    def client(self, api_key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120)

    def distribution(
        self, model: str, schedule: BudgetSchedule | None, ids: list[int]
    ) -> torch.Tensor:
        """Log-probs [T, V] of what follows PROMPT, decoded under `schedule` (None: densely)."""
        return ContractModel(self.checkpoints[model], schedule).log_probs(PROMPT, ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    model = save_model_of_words(tmp_path_factory.mktemp("words"))
    adapters = {
        name: save_adapter(model, tmp_path_factory.mktemp(name), seed, MODULES)
        for seed, name in enumerate(("one", "two"))
    }
    with start_server(
        model,
        sparrow_schedule=A.name,
        served_model_name=NAME,
        api_key=KEY,
        max_lora_rank=8,
        lora_target_modules=list(MODULES),
        max_loras_per_batch=3,
        **SERVED,
    ) as url:
        for name, (folder, _) in adapters.items():
            push_adapter(url, name, folder, api_key=KEY)
        merged = {f"{NAME}:{name}": path for name, (_, path) in adapters.items()}
        yield Served(url, {NAME: model} | merged)


def sparrow(**option) -> dict:
    return {"custom_params": {"sparrow": option}, "ignore_eos": True}


def assert_greedy(distribution: torch.Tensor, ids: list[int], logprobs: list[float]) -> None:
    """Near-ties may fall either way, so a greedy token must be almost as likely as the best."""
    chosen = distribution.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(logprobs).double(), chosen, atol=FP32, rtol=0)
    assert (distribution.max(-1).values - chosen).max() < 2 * FP32


def complete(served: Served, **fields):
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    return served.client().completions.create(**given | fields)


def chat(served: Served, **fields):
    messages = [{"role": "user", "content": words(PROMPT)}]
    given = {"model": NAME, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    return served.client().chat.completions.create(**given | fields)


def test_text_completions(served):
    answer = complete(served, logprobs=3, extra_body=sparrow(report=True))
    [choice] = answer.choices
    ids = token_ids(choice.text)
    distribution = served.distribution(NAME, A, ids)
    assert len(ids) == TOKENS and choice.finish_reason == "length"
    assert_greedy(distribution, ids, choice.logprobs.token_logprobs)
    for position, listed in enumerate(choice.logprobs.top_logprobs):
        found = {token_ids(word)[0]: value for word, value in listed.items()}
        best = distribution[position].topk(3).values
        torch.testing.assert_close(
            torch.tensor(sorted(found.values(), reverse=True)).double(), best, atol=FP32, rtol=0
        )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, TOKENS)
    # Held at the first step: prompt and first token; read: 6 pages, of which the last is partial.
    held = list(range(101, 140))
    read = [80 + (length - 1) % 16 + 1 for length in held]
    assert answer.metadata["weight_version"] == "default"
    [report] = answer.metadata["sparrow"]
    assert (report["schedule"], report["decode_steps"]) == (A.name, 39)
    assert report["kv_tokens_cached_mean"] == round(sum(held) / 39, 1)
    assert report["kv_tokens_read_mean"] == round(sum(read) / 39, 1)
    assert report["kv_tokens_read_last"] == read[-1]
    assert "sparrow" not in complete(served).metadata


def test_chat_completions(served):
    """The same tokens as a text completion of what the template makes of the messages."""
    answer = chat(served, logprobs=True, top_logprobs=2, extra_body=sparrow(kv_budget_tokens=64))
    [choice] = answer.choices
    ids = token_ids(choice.message.content)
    logprobs = [token.logprob for token in choice.logprobs.content]
    assert_greedy(served.distribution(NAME, B, ids), ids, logprobs)
    assert [token.token for token in choice.logprobs.content] == choice.message.content.split()


@pytest.mark.parametrize(
    ("ask", "text", "part"),
    [(chat, "message.content", "delta.content"), (complete, "text", "text")],
    ids=["chat", "text"],
)
def test_streams_carry_the_same_answer(served, ask, text, part):
    asked = {"extra_body": sparrow(report=True, kv_budget_tokens=48)}
    usage = {"stream_options": {"include_usage": True}}
    whole, chunks = ask(served, **asked), list(ask(served, **asked, **usage, stream=True))
    parts = [attrgetter(part)(chunk.choices[0]) or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == attrgetter(text)(whole.choices[0])
    # A busy server sends several tokens at once, but not all of them.
    assert sum(part != "" for part in parts) > 1
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]
    assert chunks[-1].usage.completion_tokens == TOKENS
    assert chunks[-1].metadata == whole.metadata and chunks[-1].choices == []
    *_, without_usage = ask(served, **asked, stream=True)
    assert without_usage.metadata == whole.metadata and without_usage.choices == []
    assert whole.metadata["sparrow"][0]["kv_budget_tokens"] == 48
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_mixed_batch_gives_each_request_what_it_asks_for(served):
    """Dense decode, two budgets and two adapters."""
    cases = [
        (NAME, {"dense": True}, None),
        (NAME, {"dense": False}, A),
        (NAME, {"kv_budget_tokens": 64}, B),
        (f"{NAME}:one", {"kv_budget_tokens": 64}, B),
        (f"{NAME}:two", {"report": True}, A),
        (f"{NAME}:two", {"dense": True}, None),
    ]

    async def together() -> list:
        base_url = f"{served.url}/v1"
        fields = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
            create = client.completions.create
            calls = [create(model=m, extra_body=sparrow(**o), **fields) for m, o, _ in cases]
            return await asyncio.gather(*calls)

    curves = []
    for (model, _, schedule), answer in zip(cases, asyncio.run(together()), strict=True):
        got = answer.choices[0]
        ids = token_ids(got.text)
        assert_greedy(served.distribution(model, schedule, ids), ids, got.logprobs.token_logprobs)
        curves.append(got.logprobs.token_logprobs)
    # The six answers must differ, or the checks above could not tell the options apart.
    for one in range(len(curves)):
        for other in range(one):
            pairs = zip(curves[one], curves[other], strict=True)
            assert max(abs(a - b) for a, b in pairs) > 10 * FP32, (cases[one], cases[other])


def test_the_calls_of_this_package_take_the_key(served):
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    request = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    [answer] = connect(served.url, KEY).generate([request])
    sequences = [(PROMPT, answer["output_ids"])]
    calls = (
        partial(score_dense, served.url, sequences),
        partial(measure_acceptance, served.url, sequences, [answer]),
        partial(get_schedule, served.url),
        partial(set_schedule, served.url, B),
        partial(push_adapter, served.url, "three", {"x": torch.zeros(1)}, {"r": 1}),
    )
    for call in calls:
        for keys in ({}, {"api_key": "wrong"}):
            with pytest.raises(EndpointError, match="401"):
                call(**keys)
    assert get_schedule(served.url, api_key=KEY) == A
    assert set_schedule(served.url, B, api_key=KEY) == A
    assert set_schedule(served.url, A, api_key=KEY) == B
    found = measure_acceptance(served.url, sequences, [answer], api_key=KEY)
    [scores] = score_dense(served.url, sequences, api_key=KEY)
    np.testing.assert_allclose(found.dense[0].logprobs, scores.logprobs, atol=FP32)
    assert found.mean.tokens == 19


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_option_is_refused_with_what_is_allowed(served, stream):
    allowed = "expected none"
    for kind in (complete, chat):
        with pytest.raises(openai.BadRequestError, match=allowed):
            kind(served, stream=stream, extra_body={"custom_params": WRONG})
