"""200 clients with good, bad, abandoned and aborted requests, and what is left when they are gone.
`make soak` runs it for SPARROW_SOAK_S seconds, ten minutes by default."""

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from adapted_models import SERVED, save_adapter, save_model_of_words, words
from servers import start_server
from waiting import wait_until

from sparrow_sglang import push_adapter
from sparrow_sglang.client.endpoint import connect

CLIENTS = 200
SECONDS = float(os.environ.get("SPARROW_SOAK_S", "3"))
WARM_S = 1.0
GROWTH = 0.05
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
OPTIONS = (None, {"dense": True}, {"kv_budget_tokens": 48})
# The longest time that a client waits before it leaves or aborts.
PATIENCE_S = 1.0
WRONG: list[dict[str, Any]] = [
    {"custom_params": {"sparrow": {"dense": 1}}},
    {"custom_params": {"sparrow": {"kv_budget_tokens": 17}}},
    {"custom_params": {"sparrow": []}},
    {"temperature": -1},
    {"top_p": 2},
    {"n": 0},
    {"stop_regex": ["("]},
]
LIMITS = {
    "/generate": "max_new_tokens",
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
}
"""Routes, and each route's name for the limit of a response's length."""
CLIENT_CLOSED = 499
"""Status of SGLang's answer to a request that is aborted while it waits, also after retraction."""


@dataclass
class Load:
    """Clients of one server; `done` counts requests by kind, `problems` are wrong answers."""

    url: str
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        # A connection for each request: the server closes idle connections, sometimes just as a
        # request arrives on one.
        limits = httpx.Limits(max_connections=CLIENTS + 50, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=300.0, limits=limits) as http:
            deadline = time.monotonic() + seconds
            draws = (random.Random(f"{self.seed} {number}") for number in range(CLIENTS))
            await asyncio.gather(*(self._client(http, draw, deadline) for draw in draws))

    async def _client(self, http: httpx.AsyncClient, draw: random.Random, deadline: float) -> None:
        kinds = [self._answered, self._answered, self._aborted, self._left, self._refused]
        while time.monotonic() < deadline:
            kind = draw.choice(kinds)
            try:
                await kind(http, draw)
            except httpx.HTTPError as error:
                self.problems.append(f"{kind.__name__}: {type(error).__name__} {error}")
            self.done[kind.__name__.lstrip("_")] += 1

    async def _answered(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        route, body = _request(draw)
        answer = await http.post(route, json=body)
        if answer.status_code != 200:
            self.problems.append(f"{route} {answer.status_code}: {answer.text[:300]}")
        elif body["stream"]:
            if not answer.text.rstrip().endswith("data: [DONE]") or '"error"' in answer.text:
                self.problems.append(f"{route}: a stream ended with {answer.text[-300:]}")
        else:
            found = answer.json()
            about = found["meta_info"] if route == "/generate" else found["usage"]
            expected = body.get("sampling_params", body)[LIMITS[route]]
            if about["completion_tokens"] != expected:
                self.problems.append(f"{route}: {about} instead of {expected} tokens")

    async def _aborted(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        rid = f"{draw.getrandbits(64):x}"
        body = _request(draw, "/generate")[1] | {"rid": rid, "stream": False}
        body["sampling_params"] |= {"max_new_tokens": 2000}
        waiting = asyncio.ensure_future(http.post("/generate", json=body))
        while not waiting.done():
            await asyncio.sleep(PATIENCE_S * draw.random())
            await http.post("/abort_request", json={"rid": rid})
        answer = await waiting
        if answer.status_code == CLIENT_CLOSED:
            return
        reason = answer.json().get("meta_info", {}).get("finish_reason", {}).get("type")
        if reason not in ("abort", "length"):
            self.problems.append(f"abort: {answer.status_code} {answer.text[:300]}")

    async def _left(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Disconnect, either while waiting or after a few events."""
        route, body = _request(draw)
        patience = 0.05 + PATIENCE_S * draw.random()
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
        route, body = _request(draw)
        if wrong := draw.choice([None, *WRONG]):
            body.get("sampling_params", body).update(wrong)
        content = json.dumps(body).encode()[: None if wrong else -3]
        kind = {"content-type": "application/json"}
        answer = await http.post(route, content=content, headers=kind)
        if not 400 <= answer.status_code < 500:
            self.problems.append(f"{route} {wrong}: {answer.status_code} {answer.text[:300]}")


def _request(draw: random.Random, route: str | None = None) -> tuple[str, dict[str, Any]]:
    """A route and a correct request for it; prompts share prefixes."""
    route = route or draw.choice(list(LIMITS))
    # With random weights, the end-of-text token is drawn once in vocabulary-size tokens.
    parameters: dict[str, Any] = {LIMITS[route]: draw.randint(1, 60), "ignore_eos": True}
    if option := draw.choice(OPTIONS):
        parameters["custom_params"] = {"sparrow": {**option, "report": draw.random() < 0.5}}
    prompt = [7] * draw.choice([0, 0, 40, 120]) + draw.choices(
        range(3, 250), k=draw.randint(1, 160)
    )
    body: dict[str, Any] = {"stream": draw.random() < 0.5}
    if route == "/generate":
        return route, body | {"sampling_params": parameters, "input_ids": prompt}
    body |= parameters | {"model": draw.choice(["tiny", "tiny:one"])}
    if route == "/v1/completions":
        return route, body | {"prompt": prompt}
    return route, body | {"messages": [{"role": "user", "content": words(prompt)}]}


def resident_bytes() -> int:
    """Memory of the server's processes, the only children of this one. Memory shared with this
    process, from which they are forked, counts too: its pages are copied one by one as they are
    touched, so the memory not shared grows for long without any leak."""
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def test_soak(tmp_path):
    model = save_model_of_words(tmp_path)
    adapter, _ = save_adapter(model, tmp_path, 0, MODULES)
    with start_server(
        model,
        sparrow_schedule="fixed-64",
        served_model_name="tiny",
        max_running_requests=64,
        max_total_tokens=16384,
        max_lora_rank=8,
        lora_target_modules=list(MODULES),
        max_loras_per_batch=2,
        # At lower levels the server logs each bad request.
        log_level="critical",
        **SERVED,
    ) as url:
        push_adapter(url, "one", adapter)
        warm = Load(url, seed=1)
        asyncio.run(warm.run(WARM_S))
        before = resident_bytes()
        load = Load(url, seed=2)
        asyncio.run(load.run(SECONDS))
        wait_until(lambda: is_idle(url))
        grown = resident_bytes() / before - 1
        print(f"{sum(load.done.values())} requests: {dict(load.done)}; memory {grown:+.1%}")
        assert warm.problems + load.problems == []
        assert set(load.done) == {"answered", "aborted", "left", "refused"}
        # Pages of many prompts are in the prefix cache, and each has its landmark.
        assert connect(url).call_sparrow("landmarks")["pages"] > 100
        # The flush is refused as long as any request holds KV.
        connect(url).flush_cache()
        assert state(url)["num_used_tokens"] == 0
        assert grown < GROWTH


def state(url: str) -> dict:
    return httpx.get(f"{url}/v1/loads", timeout=60).json()["loads"][0]


def is_idle(url: str) -> bool:
    now = state(url)
    return not now["num_running_reqs"] and not now["num_waiting_reqs"]
