"""The backend inside SGLang: what a user gets, against transformers and the contract's loop."""

import pytest
import torch
from adapted_models import save_adapter
from engines import CHOSEN, LARGE_PAGES, SCHEDULE, greedy, random_prompt, start_engine
from oracle import FP32, ContractModel, logprobs_of

from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.schedules.schedule import BudgetSchedule


@pytest.fixture(scope="module")
def sparse_engine(sharp_llama, schedule_file):
    with start_engine(
        sharp_llama,
        attention_backend="sparrow",
        sparrow_schedule=schedule_file,
        chunked_prefill_size=64,
        dtype="float32",
    ) as engine:
        yield engine


# CHOSEN with the budget shared differently among the layers.
OTHER = BudgetSchedule(
    **CHOSEN.model_dump()
    | {
        "name": "other",
        "selection": CHOSEN.selection.model_copy(update={"layer_weights": (1.5, 0.5, 1.25, 0.75)}),
    }
)


@pytest.fixture(scope="module")
def ruled_engine(sharp_llama, tmp_path_factory):
    """An engine with int4 landmarks in chosen pairs, layer weights and no dense layers."""
    CHOSEN.save(path := tmp_path_factory.mktemp("ruled") / "chosen.json")
    with start_engine(
        sharp_llama,
        attention_backend="sparrow",
        sparrow_schedule=str(path),
        chunked_prefill_size=64,
        dtype="float32",
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def ruled_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama, CHOSEN)


@pytest.fixture(scope="module")
def other_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama, OTHER)


@pytest.fixture(scope="module")
def sparse_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama, SCHEDULE)


@pytest.fixture(scope="module")
def dense_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama)


@pytest.fixture(scope="module")
def adapter(sharp_llama, tmp_path_factory) -> str:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    return save_adapter(sharp_llama, tmp_path_factory.mktemp("adapter"), 5, targets)[0]


def test_a_budget_that_covers_the_sequence_is_stock_dense_decode(sharp_llama, adapter):
    """It is so under batching, chunked prefill, prefix-cache hits, and with LoRA on and off."""
    prompts = [random_prompt(20 + length, length) for length in (3, 40, 64, 150, 210)]
    # The last prompt shares 160 tokens with the one before it.
    prompts.append(prompts[-1][:160] + random_prompt(99, 30))
    answers = {}
    for backend in ("torch_native", "sparrow"):
        schedule = {"sparrow_schedule": "fixed-1024"} if backend == "sparrow" else {}
        with start_engine(
            sharp_llama,
            attention_backend=backend,
            page_size=SCHEDULE.page_size,
            dtype="float32",
            chunked_prefill_size=64,
            enable_lora=True,
            max_lora_rank=4,
            lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            lora_paths={"adapter": adapter},
            **schedule,
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


def test_each_request_of_a_batch_follows_the_contract(sparse_engine, sparse_oracle):
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 190]
    prompts = [random_prompt(length, length) for length in lengths]
    new_tokens = [40, 50, 30, 41, 20, 40, 40, 33, 40, 17, 40]
    for prompt, answer in zip(prompts, greedy(sparse_engine, prompts, new_tokens), strict=True):
        sparse_oracle.assert_greedy(prompt, answer)


def test_sparse_decode_changes_the_log_probs(sparse_engine, dense_oracle):
    """Without this, the tests here could pass on a model that ignores far tokens."""
    prompt = random_prompt(1, 200)
    [answer] = greedy(sparse_engine, [prompt], 40)
    assert dense_oracle.errors(prompt, answer).max() > 100 * FP32


def test_a_rule_is_followed_by_every_request_of_a_batch(
    ruled_engine, ruled_oracle, sharp_llama, dense_oracle
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
    capped = [ContractModel(sharp_llama, CHOSEN, cap=cap) for cap in (48, 64)]
    oracles = [ruled_oracle, ruled_oracle, *capped, dense_oracle]
    cold = greedy(ruled_engine, prompts, 50, options)
    warm = greedy(ruled_engine, prompts, 50, options)
    for prompt, answer, again, oracle in zip(prompts, cold, warm, oracles, strict=True):
        oracle.assert_greedy(prompt, answer)
        assert again["meta_info"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16
        torch.testing.assert_close(logprobs_of(again), logprobs_of(answer), atol=FP32, rtol=0)
    connect(ruled_engine).call_sparrow("landmarks")


def test_a_row_of_the_token_table_forgets_its_last_request(ruled_engine, ruled_oracle):
    """Rows are given to one request after the other; the last one here has no option."""
    prompt = random_prompt(7, 170)
    for option in ({"dense": True}, {"kv_budget_tokens": 80}):
        greedy(ruled_engine, [prompt] * 8, 4, option)
        ruled_oracle.assert_greedy(prompt, greedy(ruled_engine, [prompt], 24)[0])


def test_larger_pages_and_other_pages_that_are_always_kept(sharp_llama, dense_oracle, tmp_path):
    schedule = LARGE_PAGES
    schedule.save(path := tmp_path / "schedule.json")
    prompts = [random_prompt(500 + length, length) for length in (30, 160, 400)]
    with start_engine(
        sharp_llama,
        attention_backend="sparrow",
        sparrow_schedule=str(path),
        page_size=schedule.page_size,
        chunked_prefill_size=128,
        dtype="float32",
    ) as engine:
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


def test_layer_weights_are_switched_on_a_running_engine(ruled_engine, ruled_oracle, other_oracle):
    prompt = random_prompt(17, 110)
    answers = []
    for schedule in (OTHER, "chosen"):
        set_schedule(ruled_engine, schedule)
        answers.append(greedy(ruled_engine, [prompt], 40)[0])
    other_oracle.assert_greedy(prompt, answers[0])
    ruled_oracle.assert_greedy(prompt, answers[1])
    assert (logprobs_of(answers[0]) - logprobs_of(answers[1])).abs().max() > 10 * FP32


def test_layers_become_dense_on_a_running_engine(ruled_engine, ruled_oracle, sharp_llama):
    """They keep their landmarks, so that they can be sparse again."""
    rule = CHOSEN.selection.model_copy(update={"layer_weights": (0.5, 0.0, 1.5, 0.0)})
    fields = CHOSEN.model_dump() | {"name": "denser", "dense_layers": (1, 3), "selection": rule}
    denser = BudgetSchedule(**fields)
    prompts = [random_prompt(length, length) for length in (70, 130)]
    set_schedule(ruled_engine, denser)
    options = [{"report": True}, {"kv_budget_tokens": 64}]
    answers = greedy(ruled_engine, prompts, 40, options)
    for cap, prompt, answer in zip([None, 64], prompts, answers, strict=True):
        ContractModel(sharp_llama, denser, cap=cap).assert_greedy(prompt, answer)
    connect(ruled_engine).call_sparrow("landmarks")
    set_schedule(ruled_engine, "chosen")
    ruled_oracle.assert_greedy(prompts[1], greedy(ruled_engine, prompts[1:], 40)[0])
