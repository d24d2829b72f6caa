"""What slime's rollout and weight sync ask of an SGLang server that slime did not start."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from engines import random_prompt, save_tiny_model
from oracle import ContractModel
from servers import start_server

from sparrow_sglang.schedule import BudgetSchedule

FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64
PROMPT = random_prompt(0, 150)
SCHEDULE = BudgetSchedule.fixed(64)
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 24,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@pytest.fixture(scope="module")
def url(sharp_llama: str) -> Iterator[str]:
    with start_server(
        sharp_llama, attention_backend="sparrow", sparrow_schedule=SCHEDULE.name
    ) as address:
        yield address


def rollout(url: str) -> tuple[list[int], list[float], str]:
    """Token ids, their log-probs and the weight version, read from where slime reads them."""
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    triples = meta["output_token_logprobs"]
    return [t[1] for t in triples], [t[0] for t in triples], meta["weight_version"]


def expected(model: str, tokens: list[int]) -> list[float]:
    rows = ContractModel(model, SCHEDULE).log_probs(PROMPT, tokens)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_rollouts_follow_weights_from_disk(url: str, tmp_path: Path) -> None:
    """In slime's order: pause, flush, load under a version, go on."""
    stepped = save_tiny_model(tmp_path, seed=1, spread=0.15)
    assert httpx.post(f"{url}/pause_generation", json={}).status_code == 200
    assert httpx.get(f"{url}/flush_cache").status_code == 200
    load = {"model_path": stepped, "weight_version": "7"}
    loaded = httpx.post(f"{url}/update_weights_from_disk", json=load, timeout=60)
    assert loaded.json()["success"] is True, loaded.text
    assert httpx.post(f"{url}/continue_generation", json={}).status_code == 200
    tokens, log_probs, version = rollout(url)
    assert version == "7"
    assert log_probs == pytest.approx(expected(stepped, tokens), abs=FP32)
