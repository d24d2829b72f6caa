"""SGLang's control calls in states in which its scheduler would end: they say what is wrong."""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapted_models import save_adapter, save_model_of_words
from safetensors.torch import load_file, save_file
from servers import running_requests, sparrow_metrics
from waiting import wait_until

from sparrow_sglang import push_adapter
from sparrow_sglang.client.endpoint import EndpointError
from sparrow_sglang.json_values import read_object
from sparrow_sglang.sglang_compat.versions import adapter_request

PROMPT = [5] * 40
SAMPLING = {"max_new_tokens": 2, "ignore_eos": True}
TARGETS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def adapter(model_of_words: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_adapter(model_of_words, tmp_path_factory.mktemp("adapter"), 0, TARGETS)[0]


@pytest.fixture(autouse=True)
def serves_afterwards(client: httpx.Client) -> Iterator[None]:
    yield
    client.post("/continue_generation", json={})
    assert generated(client) == 2


def generated(client: httpx.Client, new_tokens: int = 2, **fields: Any) -> int:
    sampling = SAMPLING | {"max_new_tokens": new_tokens}
    body = {"input_ids": PROMPT, "sampling_params": sampling} | fields
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["meta_info"]["completion_tokens"]
    return count


@contextmanager
def in_flight(client: httpx.Client, **fields: Any) -> Iterator[None]:
    """A request runs within this context, unless it is paused; afterwards it has been aborted."""
    thread = threading.Thread(target=lambda: generated(client, 3000, rid="long", **fields))
    thread.start()
    wait_until(lambda: running_requests(client))
    try:
        yield
    finally:
        client.post("/continue_generation", json={})
        client.post("/abort_request", json={"rid": "long"})
        thread.join()


def update(client: httpx.Client, model: str, **fields: Any) -> tuple[int, str]:
    body = {"model_path": model, "weight_version": "new"} | fields
    answer = client.post("/update_weights_from_disk", json=body)
    return answer.status_code, answer.json()["message"]


def version(client: httpx.Client) -> str:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
    answer: str = client.post("/generate", json=body).json()["meta_info"]["weight_version"]
    return answer


def test_new_weights_while_requests_are_paused_with_their_kv(
    client: httpx.Client, model_of_words: str
) -> None:
    with in_flight(client):
        client.post("/pause_generation", json={"mode": "in_place"})
        status, said = update(client, model_of_words)
        assert status == 400 and "requests hold KV" in said
    assert version(client) != "new"
    client.post("/pause_generation", json={"mode": "abort"})
    assert update(client, model_of_words)[0] == 200
    client.post("/continue_generation", json={})
    assert version(client) == "new"


def refused(client: httpx.Client, route: str, body: dict[str, Any]) -> str:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.text


def test_memory_that_is_not_released_or_in_use(client: httpx.Client) -> None:
    said = refused(client, "/resume_memory_occupation", {})
    assert "expected some of those released: none" in said
    assert "nothing" in refused(client, "/release_memory_occupation", {"tags": ["nothing"]})
    with in_flight(client):
        assert "requests are running" in refused(client, "/release_memory_occupation", {})
    tags = {"tags": ["kv_cache"]}
    assert client.post("/release_memory_occupation", json=tags).status_code == 200
    said = refused(client, "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING})
    assert "memory is released (kv_cache)" in said
    assert "weights" in refused(client, "/resume_memory_occupation", {})
    assert client.post("/resume_memory_occupation", json=tags).status_code == 200


@pytest.mark.parametrize(
    ("stop", "body", "resume", "why"),
    [
        ("release_memory", {"tags": ["kv_cache"]}, "resume_memory", "memory is released"),
        ("pause_generation", {}, "continue_generation", "paused"),
        ("begin_weight_update", {}, "end_weight_update", "weights are being updated"),
    ],
)
def test_a_server_that_was_told_to_stop_is_alive_and_not_ready(
    client: httpx.Client, stop: str, body: dict[str, Any], resume: str, why: str
) -> None:
    """SGLang's own answer comes after 20 seconds, and a probe would kill the server."""
    calls = [f"/{name}_occupation" if "memory" in name else f"/{name}" for name in (stop, resume)]
    stopped = client.post(calls[0], json=body)
    if stopped.status_code == 404:
        pytest.skip("this SGLang has no such call")
    assert stopped.status_code == 200
    try:
        before = time.monotonic()
        answers = [client.get(route) for route in ("/health", "/health_generate")]
        assert time.monotonic() - before < 1
    finally:
        assert client.post(calls[1], json=body).status_code == 200
    assert [answer.status_code for answer in answers] == [200, 503]
    assert all(why in answer.json()["message"] for answer in answers)
    assert client.get("/health_generate").status_code == 200


def test_a_switch_that_waits_gives_up_when_it_shall(client: httpx.Client) -> None:
    with in_flight(client):
        body = {"schedule": "fixed-96", "timeout_s": 0.5}
        assert "0.5" in refused(client, "/sparrow/schedule", body)
        assert generated(client) == 2
    assert client.get("/sparrow/schedule").json()["schedule"]["name"] == "fixed-64"


def test_measurements_of_a_former_schedule_are_not_shown(client: httpx.Client) -> None:
    def metrics() -> dict[str, float]:
        return sparrow_metrics(client.base_url)

    def shown() -> bool:
        return any(name.startswith("sparrow:acceptance_tail") for name in metrics())

    # Requests are dropped while four others are recorded or wait for their score.
    wait_until(lambda: generated(client, 60) and shown())
    answer = client.post("/sparrow/schedule", json={"schedule": "fixed-96"})
    # Provenance of shipped schedules has 14 KB.
    assert answer.status_code == 200 and "provenance" not in answer.text
    assert not shown() and not any(map(math.isnan, metrics().values()))
    assert any(name.startswith("sparrow:kv_budget_tokens") for name in metrics())
    assert client.post("/sparrow/schedule", json={"schedule": "fixed-64"}).status_code == 200


def test_an_adapter_is_not_pushed_while_requests_are_retracted(
    client: httpx.Client, adapter: str
) -> None:
    """They hold no KV, but SGLang would wait for them before it replaces the adapter."""
    push_adapter(str(client.base_url), "pushed", adapter)
    with in_flight(client, lora_path="pushed"):
        client.post("/pause_generation", json={"mode": "retract"})
        with pytest.raises(EndpointError):
            push_adapter(str(client.base_url), "pushed", adapter)
    push_adapter(str(client.base_url), "pushed", adapter)


def changed(adapter: str, folder: Path, fields: dict[str, Any], *names: str) -> str:
    """A copy of an adapter with other config fields, and with tensors of these names."""
    config = read_object(Path(adapter, "adapter_config.json"), "") | fields
    tensors = load_file(Path(adapter, "adapter_model.safetensors"))
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors |= {name: torch.zeros(4, 4) for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


WRONG_CONFIGS: list[dict[str, Any]] = [
    {"r": 8},
    {"init_lora_weights": "pissa"},
    {"a_field_of_the_next_peft": 1},
]
WRONG_NAMES = (
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    "base_model.model.lm_head.weight",
)


def test_adapters_that_sglang_would_compute_wrongly_are_refused_on_all_ways_in(
    client: httpx.Client, adapter: str, tmp_path: Path
) -> None:
    def load(name: str, folder: str) -> httpx.Response:
        return client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": folder})

    for fields in WRONG_CONFIGS:
        folder = changed(adapter, tmp_path / "wrong", fields)
        assert load("wrong", folder).status_code == 400, fields
        with pytest.raises(EndpointError):
            push_adapter(str(client.base_url), "wrong", folder)
    for name in WRONG_NAMES:
        folder = changed(adapter, tmp_path / "wrong", {}, name)
        refused = load("wrong", folder)
        assert refused.status_code == 400 and name in refused.json()["error_message"]
        with pytest.raises(EndpointError):
            push_adapter(str(client.base_url), "wrong", folder)
        # SGLang's route for tensors, which only a scheduler can read.
        tensors = load_file(Path(folder, "adapter_model.safetensors"))
        config = read_object(Path(folder, "adapter_config.json"), "")
        request = adapter_request("wrong", config, tensors, 1)
        body = {name: getattr(request, name) for name in ("lora_name", "config_dict")}
        body |= {name: value for name, value in to_json(request).items() if "tensors" in name}
        assert client.post("/load_lora_adapter_from_tensors", json=body).status_code == 400
    # The first request for an adapter of another model would end the scheduler.
    wider = save_model_of_words(tmp_path / "wider", hidden_size=288)
    refused = load("wrong", save_adapter(wider, tmp_path / "of-wider", 0, TARGETS)[0])
    assert refused.status_code == 400 and "expected [4, 144]" in refused.text
    # So would one that lacks a factor, or the first of the projections that are computed as one.
    partial = Path(changed(adapter, tmp_path / "partial", {}), "adapter_model.safetensors")
    for lacking, named in (("q_proj.lora_B", "lora_A and lora_B"), ("q_proj", "expected q_proj")):
        tensors = load_file(Path(adapter, partial.name))
        save_file({key: of for key, of in tensors.items() if lacking not in key}, partial)
        refused = load("wrong", str(partial.parent))
        assert refused.status_code == 400 and named in refused.text
    # What PEFT writes by default, and what does not matter once an adapter is trained.
    harmless = {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "inference_mode": True}
    right = changed(adapter, tmp_path / "right", harmless | {"layers_pattern": "layers"})
    assert load("right", right).status_code == 200
    push_adapter(str(client.base_url), "pushed", right)
    for name in ("right", "pushed"):
        assert generated(client, lora_path=name) == 2


def to_json(request: Any) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
    return dict(msgspec.to_builtins({key: value for key, value in fields.items() if value}))
