"""200 clients with good, bad, abandoned and aborted requests, and what is left when they are gone.

Runs for SPARROW_SOAK_S seconds; `make soak` runs it for ten minutes.
"""

import asyncio
import os
import time

import httpx
import psutil
from adapted_models import save_adapter, save_model_of_words
from servers import start_server
from soak_load import Load, Traffic

from sparrow_sglang import push_adapter
from sparrow_sglang.client.endpoint import connect

CLIENTS = 200
SECONDS = float(os.environ.get("SPARROW_SOAK_S", "5"))
WARM_S = 2.0
GROWTH = 0.05
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
TRAFFIC = Traffic(
    models=("tiny", "tiny:one"),
    vocabulary=range(3, 250),
    prompt_tokens=(160,),
    shared_tokens=(0, 0, 40, 120),
    new_tokens=(60,),
    aborted_tokens=2000,
    too_long=9000,
    too_large=100_000,
    options=(None, {"dense": True}, {"schedule": "fixed-96"}, {"kv_budget_tokens": 48}),
)


def resident_bytes() -> int:
    """Memory of the server's processes, the only children of this one.

    Memory shared with this process, from which they are forked, counts too: its pages are copied
    one by one as they are touched, so the memory not shared grows for long without any leak.
    """
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def test_soak(tmp_path):
    model = save_model_of_words(tmp_path)
    adapter, _ = save_adapter(model, tmp_path, 0, MODULES)
    with start_server(
        model,
        skip_tokenizer_init=False,
        grammar_backend="none",
        attention_backend="sparrow",
        sparrow_schedule="fixed-64,fixed-96",
        served_model_name="tiny",
        max_running_requests=64,
        max_total_tokens=16384,
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=list(MODULES),
        max_loras_per_batch=2,
        lora_backend="torch_native",
        # At lower levels the server logs each bad request.
        log_level="critical",
    ) as url:
        push_adapter(url, "one", adapter)
        warm = Load(url, TRAFFIC, seed=1)
        asyncio.run(warm.run(CLIENTS, WARM_S))
        before = resident_bytes()
        load = Load(url, TRAFFIC, seed=2)
        asyncio.run(load.run(CLIENTS, SECONDS))
        wait_until_idle(url)
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


def wait_until_idle(url: str) -> None:
    deadline = time.monotonic() + 60
    while (now := state(url))["num_running_reqs"] or now["num_waiting_reqs"]:
        assert time.monotonic() < deadline, f"requests are left that nobody waits for: {now}"
        time.sleep(0.2)
