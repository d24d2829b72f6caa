"""SGLang's control calls in states in which its scheduler would end: they say what is wrong."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapted_models import save_adapter, save_model_of_words
from safetensors.torch import load_file, save_file
from servers import start_server

from sparrow_sglang.json_values import read_object

PROMPT = [5] * 40
SAMPLING = {"max_new_tokens": 2, "ignore_eos": True}
TARGETS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_of_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_adapter(model, tmp_path_factory.mktemp("adapter"), 0, TARGETS)[0]


@pytest.fixture(scope="module")
def client(model: str) -> Iterator[httpx.Client]:
    with (
        start_server(
            model,
            attention_backend="sparrow",
            sparrow_schedule="fixed-64",
            enable_lora=True,
            max_lora_rank=16,
            lora_target_modules=list(TARGETS),
            lora_backend="torch_native",
            log_level="critical",
        ) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


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
def in_flight(client: httpx.Client) -> Iterator[None]:
    """A request runs within this context, unless it is paused; afterwards it has been aborted."""
    thread = threading.Thread(target=lambda: generated(client, 3000, rid="long"))
    thread.start()
    while not client.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
        time.sleep(0.05)
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
    client: httpx.Client, model: str
) -> None:
    with in_flight(client):
        client.post("/pause_generation", json={"mode": "in_place"})
        status, said = update(client, model)
        assert status == 400 and "the weights were not updated: requests hold KV" in said
    assert version(client) != "new"
    client.post("/pause_generation", json={"mode": "abort"})
    assert update(client, model)[0] == 200
    client.post("/continue_generation", json={})
    assert version(client) == "new"


def refused(client: httpx.Client, route: str, body: dict[str, Any]) -> str:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.text


def test_memory_that_is_not_released_or_in_use(client: httpx.Client) -> None:
    said = refused(client, "/resume_memory_occupation", {})
    assert "kv_cache, weights is not released; expected tags of what is: nothing" in said
    unknown = {"tags": ["nothing"]}
    said = refused(client, "/release_memory_occupation", unknown)
    assert "tags=['nothing']: expected some of cuda_graph, kv_cache, weights" in said
    with in_flight(client):
        assert "requests are running" in refused(client, "/release_memory_occupation", {})
    tags = {"tags": ["kv_cache"]}
    assert client.post("/release_memory_occupation", json=tags).status_code == 200
    said = refused(client, "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING})
    assert "memory is released (kv_cache)" in said
    assert "weights is not released" in refused(client, "/resume_memory_occupation", {})
    assert client.post("/resume_memory_occupation", json=tags).status_code == 200


def test_a_switch_that_waits_gives_up_when_it_shall(client: httpx.Client) -> None:
    with in_flight(client):
        body = {"schedule": "fixed-96", "timeout_s": 0.5}
        said = refused(client, "/sparrow/schedule", body)
        assert "a switch of the schedule was given up after 0.5 s: 1 requests are running" in said
        assert generated(client) == 2
    assert client.get("/sparrow/schedule").json()["schedule"]["name"] == "fixed-64"


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def of_rank_8(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["r"] = 8


def with_rslora(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["use_rslora"] = True


def changed(adapter: str, folder: Path, change: Change) -> str:
    config = read_object(Path(adapter, "adapter_config.json"), "")
    tensors = load_file(Path(adapter, "adapter_model.safetensors"))
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def test_an_adapter_that_sglang_would_compute_wrongly_is_not_loaded(
    client: httpx.Client, adapter: str, tmp_path: Path
) -> None:
    def load(name: str, folder: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": folder}
        return client.post("/load_lora_adapter", json=body)

    refused = load("wrong", changed(adapter, tmp_path, of_rank_8))
    assert refused.status_code == 400
    assert "expected floating-point numbers [8, 144]" in refused.json()["error_message"]
    assert load("right", adapter).status_code == 200
    assert generated(client, lora_path="right") == 2


def test_the_adapters_of_the_start_are_checked(model: str, adapter: str, tmp_path: Path) -> None:
    from sparrow_sglang.commands.serve import parse_server_args
    from sparrow_sglang.errors import InputError

    words = [model, "--sparrow-schedule", "fixed-64", "--enable-lora", "--lora-backend"]
    words += ["torch_native", "--skip-tokenizer-init", "--lora-paths"]
    assert parse_server_args([*words, f"a={adapter}"]).enable_lora
    with pytest.raises(InputError, match="use_rslora=True: SGLang cannot serve it"):
        parse_server_args([*words, f"a={changed(adapter, tmp_path, with_rslora)}"])
