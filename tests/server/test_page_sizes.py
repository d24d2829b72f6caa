"""A server with pages of 32 and of 64 tokens: what it decodes, reports, caches and switches to."""

from pathlib import Path

import httpx
import pytest
from engines import LARGE_PAGES, random_prompt
from oracle import ContractModel
from servers import start_server

from sparrow_sglang.schedule import BudgetSchedule

FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64
LENGTH, NEW_TOKENS = 450, 20


@pytest.mark.parametrize("schedule", LARGE_PAGES, ids=lambda schedule: schedule.name)
def test_a_server_with_large_pages(
    schedule: BudgetSchedule, sharp_llama: str, tmp_path: Path
) -> None:
    schedule.save(path := tmp_path / "schedule.json")
    page, prompt = schedule.page_size, random_prompt(1, LENGTH)
    body = {
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "custom_params": {"sparrow": {"report": True}},
        },
    }
    arguments = {"sparrow_schedule": str(path), "page_size": page, "attention_backend": "sparrow"}
    with start_server(sharp_llama, **arguments) as url, httpx.Client(timeout=120) as client:
        cold, warm = (client.post(f"{url}/generate", json=body).json() for _ in range(2))
        refused = client.post(f"{url}/sparrow/schedule", json={"schedule": "qwen3-1.7b-0.86"})
    oracle = ContractModel(sharp_llama, schedule)
    for answer in (cold, warm):
        assert oracle.errors(prompt, answer).max() < FP32
        report = answer["meta_info"]["sparrow"]
        cached = LENGTH + NEW_TOKENS - 1
        left_out = -(-cached // page) * page - schedule.budget_tokens[1]
        assert report["kv_tokens_read_last"] == cached - left_out < cached
    assert warm["meta_info"]["cached_tokens"] == (LENGTH - 1) // page * page
    assert refused.status_code == 400
    assert "page" in refused.text
