"""Load of the soak tests: clients that send good and bad requests at random.

In: a server's URL and its traffic. Out: counts of requests by kind, and the problems found.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

BAD_VALUES: dict[str, list[Any]] = {
    "custom_params": [
        {"sparrow": {"schedule": "no-such"}},
        {"sparrow": {"dense": 1}},
        {"sparrow": {"kv_budget_tokens": 17}},
        {"sparrow": {"report": "yes"}},
        {"sparrow": []},
        "sparrow",
    ],
    "temperature": [-1, "hot"],
    "top_p": [0, 2],
    "top_k": [-7, 1.5],
    "n": [0, "x"],
    "frequency_penalty": [9],
    "stop": [[1], 5],
    "stop_regex": ["("],
    "regex": ["("],
}

LIMITS = {
    "/generate": "max_new_tokens",
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
}
"""Routes, and each route's name for the limit of a response's length."""

CLIENT_CLOSED = 499
"""Status of SGLang's answer to a request that is aborted while it waits, also after retraction."""


@dataclass(frozen=True)
class Traffic:
    """The parameters from which requests are drawn.

    Attributes:
        models: names that OpenAI's routes know, adapters among them.
        vocabulary: token ids of prompts; `too_large` is no token id of the model.
        prompt_tokens: limits of a prompt's own length; a prompt starts with shared tokens, whose
            number is drawn from `shared_tokens`, followed by 1 to one of these limits.
        new_tokens: limits of a response's length; it is 1 to one of these limits.
        too_long: number of prompt tokens that exceeds the context.
        options: per-request options of ours; None is a request without options.
        aborted_tokens: length of a response that is aborted, if it gets that far.
        patience_s: longest time that a client waits before it leaves or aborts.
        timeout_s: time within which every answer must come.
    """

    models: tuple[str, ...]
    vocabulary: range
    prompt_tokens: tuple[int, ...]
    shared_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    aborted_tokens: int
    too_long: int
    too_large: int
    options: tuple[Mapping[str, Any] | None, ...]
    patience_s: float = 1.0
    timeout_s: float = 300.0


@dataclass
class Load:
    """Clients of one server; `problems` lists wrong answers and errors."""

    url: str
    traffic: Traffic
    seed: int = 0
    retractions: int = 0
    tokens: int = 0
    done: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    async def run(self, clients: int, seconds: float) -> None:
        """Send requests from `clients` clients at a time for `seconds`."""
        # A connection for each request: the server closes idle connections, sometimes just as a
        # request arrives on one.
        limits = httpx.Limits(max_connections=clients + 50, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=self.traffic.timeout_s, limits=limits
        ) as http:
            deadline = time.monotonic() + seconds
            await asyncio.gather(
                *(
                    self._client(http, random.Random(f"{self.seed} {number}"), deadline)
                    for number in range(clients)
                )
            )

    async def _client(self, http: httpx.AsyncClient, draw: random.Random, deadline: float) -> None:
        kinds: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]] = [
            self._answered,
            self._answered,
            self._aborted,
            self._left,
            self._refused,
        ]
        while time.monotonic() < deadline:
            kind = draw.choice(kinds)
            try:
                await kind(http, draw)
            except httpx.HTTPError as error:
                self.problems.append(f"{kind.__name__}: {type(error).__name__} {error}")
            self.done[kind.__name__.lstrip("_")] += 1

    async def _answered(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a right request, wait for its answer and check it."""
        route, body = self._request(draw)
        answer = await http.post(route, json=body)
        if answer.status_code != 200:
            self.problems.append(f"{route} {answer.status_code}: {answer.text[:300]}")
            return
        if body.get("stream"):
            if not answer.text.rstrip().endswith("data: [DONE]") or '"error"' in answer.text:
                self.problems.append(f"{route}: a stream ended with {answer.text[-300:]}")
            return
        found = answer.json()
        if route == "/generate":
            listed = found if isinstance(found, list) else [found]
            counts = sum(one["meta_info"]["completion_tokens"] for one in listed)
            self.retractions += sum(one["meta_info"].get("num_retractions", 0) for one in listed)
        else:
            counts = found["usage"]["completion_tokens"]
        self.tokens += counts
        if counts != (expected := _expected_tokens(route, body)):
            self.problems.append(f"{route}: {counts} tokens instead of {expected}")

    async def _aborted(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a request and abort it after a random time."""
        rid = f"{draw.getrandbits(64):x}"
        body = self._request(draw, "/generate")[1] | {"rid": rid, "stream": False}
        body["sampling_params"] |= {"max_new_tokens": self.traffic.aborted_tokens, "n": 1}
        waiting = asyncio.ensure_future(http.post("/generate", json=body))
        while not waiting.done():
            await asyncio.sleep(self.traffic.patience_s * draw.random())
            await http.post("/abort_request", json={"rid": rid})
        answer = await waiting
        if answer.status_code == CLIENT_CLOSED:
            return
        reason = answer.json().get("meta_info", {}).get("finish_reason", {}).get("type")
        if reason not in ("abort", "length"):
            self.problems.append(f"abort: {answer.status_code} {answer.text[:300]}")

    async def _left(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a request and disconnect, either while waiting or after a few events."""
        route, body = self._request(draw)
        body["stream"] = draw.random() < 0.7
        patience = 0.05 + self.traffic.patience_s * draw.random()
        try:
            async with http.stream("POST", route, json=body, timeout=patience) as answer:
                events = draw.randrange(5)
                async for line in answer.aiter_lines():
                    events -= line.startswith("data: ")
                    if events < 0:
                        break
        except httpx.TimeoutException:
            pass

    async def _refused(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Send a request that is wrong in one place; the server must answer with a 4xx status."""
        route, body, wrong = self._bad(draw)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await http.post(
            route, content=content, headers={"content-type": "application/json"}
        )
        if not 400 <= answer.status_code < 500 or len(answer.text) < 20:
            self.problems.append(f"{route} {wrong}: {answer.status_code} {answer.text[:300]}")

    def _bad(self, draw: random.Random) -> tuple[str, Any, str]:
        route, body = self._request(draw)
        parameters = body.get("sampling_params", body)
        name = draw.choice([*BAD_VALUES, "json", "empty", "long", "vocabulary", "adapter", "top"])
        if name in BAD_VALUES:
            parameters[name] = draw.choice(BAD_VALUES[name])
            return route, body, f"{name}={parameters[name]!r}"
        if name == "json":
            return route, json.dumps(body).encode()[:-3], name
        if name == "adapter":
            key, value = ("lora_path", "none") if route == "/generate" else ("model", "tiny:none")
            return route, body | {key: value}, name
        if name == "top":
            # `too_large` is more than the size of the vocabulary.
            count = self.traffic.too_large
            if route == "/generate":
                body |= {"return_logprob": True, "top_logprobs_num": count}
            else:
                body |= {"logprobs": count if route == "/v1/completions" else "x"}
            return route, body, name
        ids = {
            "empty": [],
            "long": [5] * self.traffic.too_long,
            "vocabulary": [5, self.traffic.too_large],
        }[name]
        if route == "/v1/chat/completions":
            text = words(ids) if name == "long" else ""
            body["messages"] = [{"role": "user", "content": text}] if name == "long" else []
        else:
            body["input_ids" if route == "/generate" else "prompt"] = ids
        return route, body, name

    def _request(self, draw: random.Random, route: str | None = None) -> tuple[str, dict[str, Any]]:
        """A route and a correct request for it."""
        route = route or draw.choice(list(LIMITS))
        parameters: dict[str, Any] = {
            LIMITS[route]: draw.randint(1, draw.choice(self.traffic.new_tokens)),
            "n": draw.choice([1, 1, 2]),
            # With random weights, the end-of-text token is drawn once in vocabulary-size tokens.
            "ignore_eos": True,
        }
        option = draw.choice(self.traffic.options)
        if option is not None:
            parameters["custom_params"] = {"sparrow": {**option, "report": draw.random() < 0.5}}
        prompt, with_logprobs = self._prompt(draw), draw.random() < 0.5
        body: dict[str, Any] = {"stream": draw.random() < 0.5}
        if route == "/generate":
            body |= {"sampling_params": parameters, "return_logprob": with_logprobs}
            return route, body | {"input_ids": prompt}
        body |= parameters | {"model": draw.choice(self.traffic.models)}
        if route == "/v1/completions":
            return route, body | {"prompt": prompt, "logprobs": 1 if with_logprobs else None}
        messages = [{"role": "user", "content": words(prompt)}]
        return route, body | {"messages": messages, "logprobs": with_logprobs}

    def _prompt(self, draw: random.Random) -> list[int]:
        """Half of the prompts begin as others do, so that the prefix cache is used."""
        shared = [7] * draw.choice(self.traffic.shared_tokens)
        own = draw.randint(1, draw.choice(self.traffic.prompt_tokens))
        return shared + draw.choices(self.traffic.vocabulary, k=own)


def words(ids: list[int]) -> str:
    """Text that a tokenizer of `save_word_tokenizer` encodes as these ids."""
    return " ".join(f"w{token}" for token in ids)


def _expected_tokens(route: str, body: dict[str, Any]) -> int:
    parameters = body.get("sampling_params", body)
    return int(parameters[LIMITS[route]] * parameters["n"])
