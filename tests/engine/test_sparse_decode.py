"""The backend inside SGLang: what a user gets, against transformers and the contract's loop."""

import pytest
import torch
from adapted_models import save_adapter
from engines import (
    INT4_SCHEDULE,
    LARGE_PAGES,
    SCHEDULE,
    greedy,
    random_prompt,
    sparse,
    start_engine,
)
from oracle import FP32, ContractModel, logprobs_of

from sparrow_sglang.client.endpoint import connect


@pytest.fixture(scope="module")
def int4_engine(sharp_llama):
    """An engine with int4 landmarks and no dense layers."""
    with start_engine(sharp_llama, **sparse(INT4_SCHEDULE), chunked_prefill_size=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def int4_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama, INT4_SCHEDULE)


@pytest.fixture(scope="module")
def dense_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama)


def test_a_budget_that_covers_the_sequence_is_stock_dense_decode(sharp_llama, tmp_path):
    """It is so under batching, chunked prefill, prefix-cache hits, and with LoRA on and off."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter, _ = save_adapter(sharp_llama, tmp_path, 5, targets)
    prompts = [random_prompt(20 + length, length) for length in (3, 40, 64, 150, 210)]
    # The last prompt shares 160 tokens with the one before it.
    prompts.append(prompts[-1][:160] + random_prompt(99, 30))
    answers = {}
    for backend in ("torch_native", "sparrow"):
        ours = sparse("fixed-1024") if backend == "sparrow" else {"attention_backend": backend}
        with start_engine(
            sharp_llama,
            page_size=SCHEDULE.page_size,
            chunked_prefill_size=64,
            enable_lora=True,
            max_lora_rank=4,
            lora_target_modules=list(targets),
            lora_paths={"adapter": adapter},
            **ours,
        ) as engine:
            cold = greedy(engine, prompts, 20)
            warm = greedy(engine, prompts, 20)
            adapted = greedy(engine, prompts, 20, lora_path=["adapter", None] * 3)
            answers[backend] = cold + warm + adapted
    for stock, ours in zip(answers["torch_native"], answers["sparrow"], strict=True):
        assert ours["output_ids"] == stock["output_ids"]
        assert ours["meta_info"]["cached_tokens"] == stock["meta_info"]["cached_tokens"]
        torch.testing.assert_close(logprobs_of(ours), logprobs_of(stock), atol=3e-5, rtol=0)
    plain, adapted = answers["sparrow"][0], answers["sparrow"][12]
    assert plain["output_ids"] != adapted["output_ids"]
    assert answers["sparrow"][1]["output_ids"] == answers["sparrow"][13]["output_ids"]


def test_each_request_of_a_batch_follows_the_contract(sharp_llama, dense_oracle):
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 190]
    prompts = [random_prompt(length, length) for length in lengths]
    new_tokens = [40, 50, 30, 41, 20, 40, 40, 33, 40, 17, 40]
    with start_engine(sharp_llama, **sparse(SCHEDULE), chunked_prefill_size=64) as engine:
        answers = greedy(engine, prompts, new_tokens)
    oracle = ContractModel(sharp_llama, SCHEDULE)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.assert_greedy(prompt, answer)
    # Without this, the tests here could pass on a model that ignores far tokens.
    assert dense_oracle.errors(prompt, answer).max() > 100 * FP32


def test_a_rule_is_followed_by_every_request_of_a_batch(
    int4_engine, int4_oracle, sharp_llama, dense_oracle
):
    """Each under a budget of its own, cold and from the prefix cache."""
    lengths = [3, 63, 100, 129, 150]
    prompts = [random_prompt(300 + length, length) for length in lengths]
    options = [
        {"report": True},
        {"report": True},
        {"kv_budget_tokens": 48},
        {"kv_budget_tokens": 64},
        {"dense": True},
    ]
    capped = [ContractModel(sharp_llama, INT4_SCHEDULE, cap=cap) for cap in (48, 64)]
    oracles = [int4_oracle, int4_oracle, *capped, dense_oracle]
    cold = greedy(int4_engine, prompts, 50, options)
    warm = greedy(int4_engine, prompts, 50, options)
    for prompt, answer, again, oracle in zip(prompts, cold, warm, oracles, strict=True):
        oracle.assert_greedy(prompt, answer)
        assert again["meta_info"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16
        torch.testing.assert_close(logprobs_of(again), logprobs_of(answer), atol=FP32, rtol=0)
    connect(int4_engine).call_sparrow("landmarks")


def test_a_row_of_the_token_table_forgets_its_last_request(int4_engine, int4_oracle):
    """Rows are given to one request after the other; the last one here has no option."""
    prompt = random_prompt(7, 170)
    for option in ({"dense": True}, {"kv_budget_tokens": 80}):
        greedy(int4_engine, [prompt] * 8, 4, option)
        int4_oracle.assert_greedy(prompt, greedy(int4_engine, [prompt], 24)[0])


def test_larger_pages_and_other_pages_that_are_always_kept(sharp_llama, dense_oracle):
    schedule = LARGE_PAGES
    prompts = [random_prompt(500 + length, length) for length in (30, 160, 400)]
    arguments = sparse(schedule) | {"page_size": schedule.page_size, "chunked_prefill_size": 128}
    with start_engine(sharp_llama, **arguments) as engine:
        cold = greedy(engine, prompts, 50)
        warm = greedy(engine, prompts, 50)
        connect(engine).call_sparrow("landmarks")
    oracle = ContractModel(sharp_llama, schedule)
    for prompt, answer, again in zip(prompts, cold, warm, strict=True):
        oracle.assert_greedy(prompt, answer)
        oracle.assert_greedy(prompt, again)
        whole_pages = (len(prompt) - 1) // schedule.page_size * schedule.page_size
        assert again["meta_info"]["cached_tokens"] == whole_pages
    assert dense_oracle.errors(prompts[2], cold[2]).max() > 10 * FP32
