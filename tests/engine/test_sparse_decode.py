"""The backend inside SGLang: what a user gets, against transformers and the contract's loop."""

import random

import pytest
import torch
from engines import SCHEDULE, start_engine
from oracle import ContractModel

FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64


def tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 250) for _ in range(count)]


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


@pytest.fixture(scope="module")
def sparse_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama, SCHEDULE)


@pytest.fixture(scope="module")
def dense_oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama)


def generate(engine, prompts: list, new_tokens: int | list[int], lora=None) -> list[dict]:
    """Greedy generations: token ids, their log-probs and the prompt tokens found in the cache."""
    lengths = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(prompts)
    answers = engine.generate(
        input_ids=prompts,
        sampling_params=[
            {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
        ],
        return_logprob=True,
        lora_path=lora,
    )
    return [
        {
            "ids": [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]],
            "log_probs": torch.tensor(
                [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
            ),
            "cached": answer["meta_info"]["cached_tokens"],
        }
        for answer in answers
    ]


def rescore(engine, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs of `response` after `prompt` from a prefill on the same server."""
    answer = engine.generate(
        input_ids=prompt + response,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    return torch.tensor([value for value, _, _ in answer["meta_info"]["input_token_logprobs"][1:]])


def chosen(log_probs: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return log_probs.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).float()


def assert_follows(oracle: ContractModel, prompt: list[int], answer: dict) -> None:
    """The answer is the oracle's greedy choice, with the oracle's log-probs."""
    expected = oracle.log_probs(prompt, answer["ids"])
    torch.testing.assert_close(
        answer["log_probs"], chosen(expected, answer["ids"]), atol=FP32, rtol=0
    )
    assert (expected.max(-1).values - chosen(expected, answer["ids"]).double()).max() < 2 * FP32


@pytest.fixture(scope="module")
def adapter(sharp_llama, tmp_path_factory) -> str:
    """A LoRA adapter strong enough to change the greedy tokens."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(sharp_llama),
        LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False),
    )
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return str(folder)


def test_a_budget_that_covers_the_sequence_is_stock_dense_decode(sharp_llama, adapter):
    """Through batching, chunked prefill, prefix-cache hits, LoRA on and off."""
    prompts = [tokens(20 + length, length) for length in (3, 40, 64, 150, 210)]
    # The last prompt shares 160 tokens with the one before it.
    prompts.append(prompts[-1][:160] + tokens(99, 30))
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
            cold = generate(engine, prompts, 20)
            warm = generate(engine, prompts, 20)
            adapted = generate(engine, prompts, 20, lora=["adapter", None] * 3)
            answers[backend] = cold + warm + adapted
    for stock, ours in zip(answers["torch_native"], answers["sparrow"], strict=True):
        assert ours["ids"] == stock["ids"]
        assert ours["cached"] == stock["cached"]
        torch.testing.assert_close(ours["log_probs"], stock["log_probs"], atol=1e-5, rtol=0)
    plain, adapted = answers["sparrow"][0], answers["sparrow"][12]
    assert plain["ids"] != adapted["ids"]
    assert answers["sparrow"][1]["ids"] == answers["sparrow"][13]["ids"]


@pytest.mark.parametrize(
    "length",
    [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 190],
    ids=lambda length: f"prompt{length}",
)
def test_generation_follows_the_contract(sparse_engine, sparse_oracle, length):
    prompt = tokens(length, length)
    answer = generate(sparse_engine, [prompt], 40)[0]
    assert_follows(sparse_oracle, prompt, answer)


def test_sparse_decode_changes_the_log_probs(sparse_engine, dense_oracle):
    """Without this, the tests here could pass on a model that ignores far tokens."""
    prompt = tokens(1, 200)
    answer = generate(sparse_engine, [prompt], 40)[0]
    dense = chosen(dense_oracle.log_probs(prompt, answer["ids"]), answer["ids"])
    assert (answer["log_probs"] - dense).abs().max() > 100 * FP32


def test_a_batch_gives_each_request_what_it_gets_alone(sparse_engine, sparse_oracle):
    lengths = [5, 47, 48, 100, 129, 180]
    prompts = [tokens(100 + length, length) for length in lengths]
    new_tokens = [50, 30, 41, 20, 17, 33]
    for prompt, answer in zip(prompts, generate(sparse_engine, prompts, new_tokens), strict=True):
        assert_follows(sparse_oracle, prompt, answer)


def test_a_prompt_from_the_prefix_cache_gives_what_it_gives_cold(sparse_engine, sparse_oracle):
    shared = tokens(7, 150)
    cold = generate(sparse_engine, [shared], 30)[0]
    warm = generate(sparse_engine, [shared], 30)[0]
    longer = generate(sparse_engine, [shared + tokens(8, 20)], 30)[0]
    assert cold["cached"] == 0
    assert warm["cached"] == 144 and longer["cached"] == 144
    assert warm["ids"] == cold["ids"]
    torch.testing.assert_close(warm["log_probs"], cold["log_probs"], atol=FP32, rtol=0)
    assert_follows(sparse_oracle, shared + tokens(8, 20), longer)


def test_a_second_turn_reuses_the_prompt_but_no_sparse_written_kv(
    sparse_engine, sparse_oracle, dense_oracle
):
    prompt = tokens(11, 130)
    first = generate(sparse_engine, [prompt], 60)[0]
    history = prompt + first["ids"]
    follow_up = tokens(12, 21)
    second = generate(sparse_engine, [history + follow_up], 1)[0]
    assert second["cached"] == 128  # whole pages of the first prompt, and nothing generated
    dense = dense_oracle.log_probs(history + follow_up, second["ids"])
    torch.testing.assert_close(second["log_probs"], chosen(dense, second["ids"]), atol=FP32, rtol=0)
    # Had the KV of the sparse turn been reused, the answer would be this one:
    reused = sparse_oracle.log_probs(prompt, first["ids"] + follow_up + second["ids"])[-1:]
    assert (chosen(reused, second["ids"]) - second["log_probs"]).abs().max() > 10 * FP32


def test_rescoring_a_sparse_generation_on_the_same_server_is_dense(sparse_engine, dense_oracle):
    prompt = tokens(13, 90)
    response = generate(sparse_engine, [prompt], 150)[0]["ids"]
    # 240 tokens in chunks of 64: later chunks attend to what the prefix tree holds of earlier ones.
    scored = rescore(sparse_engine, prompt, response)
    dense = chosen(dense_oracle.log_probs(prompt, response), response)
    torch.testing.assert_close(scored, dense, atol=FP32, rtol=0)


def test_short_generations_stay_reusable(sparse_engine):
    """Below the first sparse length decode is dense, and its KV serves the next turn."""
    assert SCHEDULE.first_sparse_length() == 81
    prompt = tokens(14, 20)
    first = generate(sparse_engine, [prompt], 30)[0]
    second = generate(sparse_engine, [prompt + first["ids"] + tokens(15, 4)], 1)[0]
    assert second["cached"] == 48
