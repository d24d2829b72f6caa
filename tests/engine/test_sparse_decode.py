"""The backend inside SGLang: what a user gets, against transformers and the contract's loop."""

import pytest
import torch
from adapted_models import save_adapter
from engines import CHOSEN, LARGE_PAGES, SCHEDULE, random_prompt, start_engine
from oracle import ContractModel

from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.schedule import BudgetSchedule

FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64


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


def generate(
    engine, prompts: list, new_tokens: int | list[int], lora=None, options=None
) -> list[dict]:
    """Greedy generations: token ids, their log-probs and the prompt tokens found in the cache.

    Args:
        options: what each of the prompts asks of sparse decode.
    """
    lengths = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(prompts)
    options = options or [None] * len(prompts)
    answers = engine.generate(
        input_ids=prompts,
        sampling_params=[
            {
                "temperature": 0,
                "max_new_tokens": length,
                "ignore_eos": True,
                "custom_params": option and {"sparrow": option},
            }
            for length, option in zip(lengths, options, strict=True)
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
            cold = generate(engine, prompts, 20)
            warm = generate(engine, prompts, 20)
            adapted = generate(engine, prompts, 20, lora=["adapter", None] * 3)
            answers[backend] = cold + warm + adapted
    for stock, ours in zip(answers["torch_native"], answers["sparrow"], strict=True):
        assert ours["ids"] == stock["ids"]
        assert ours["cached"] == stock["cached"]
        torch.testing.assert_close(ours["log_probs"], stock["log_probs"], atol=3e-5, rtol=0)
    plain, adapted = answers["sparrow"][0], answers["sparrow"][12]
    assert plain["ids"] != adapted["ids"]
    assert answers["sparrow"][1]["ids"] == answers["sparrow"][13]["ids"]


def test_each_request_of_a_batch_follows_the_contract(sparse_engine, sparse_oracle):
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 190]
    prompts = [random_prompt(length, length) for length in lengths]
    new_tokens = [40, 50, 30, 41, 20, 40, 40, 33, 40, 17, 40]
    for prompt, answer in zip(prompts, generate(sparse_engine, prompts, new_tokens), strict=True):
        assert_follows(sparse_oracle, prompt, answer)


def test_sparse_decode_changes_the_log_probs(sparse_engine, dense_oracle):
    """Without this, the tests here could pass on a model that ignores far tokens."""
    prompt = random_prompt(1, 200)
    answer = generate(sparse_engine, [prompt], 40)[0]
    dense = chosen(dense_oracle.log_probs(prompt, answer["ids"]), answer["ids"])
    assert (answer["log_probs"] - dense).abs().max() > 100 * FP32


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
    cold = generate(ruled_engine, prompts, 50, options=options)
    warm = generate(ruled_engine, prompts, 50, options=options)
    for prompt, answer, again, oracle in zip(prompts, cold, warm, oracles, strict=True):
        assert_follows(oracle, prompt, answer)
        assert again["cached"] == (len(prompt) - 1) // 16 * 16
        torch.testing.assert_close(again["log_probs"], answer["log_probs"], atol=FP32, rtol=0)
    connect(ruled_engine).call_sparrow("landmarks")


def test_a_row_of_the_token_table_forgets_its_last_request(ruled_engine, ruled_oracle):
    """Rows are given to one request after the other; the last one here has no option."""
    prompt = random_prompt(7, 170)
    for option in ({"dense": True}, {"kv_budget_tokens": 80}):
        generate(ruled_engine, [prompt] * 8, 4, options=[option] * 8)
        assert_follows(ruled_oracle, prompt, generate(ruled_engine, [prompt], 24)[0])


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
        cold = generate(engine, prompts, 50)
        warm = generate(engine, prompts, 50)
        connect(engine).call_sparrow("landmarks")
    oracle = ContractModel(sharp_llama, schedule)
    for prompt, answer, again in zip(prompts, cold, warm, strict=True):
        assert_follows(oracle, prompt, answer)
        assert_follows(oracle, prompt, again)
        assert again["cached"] == (len(prompt) - 1) // schedule.page_size * schedule.page_size
    dense = chosen(dense_oracle.log_probs(prompts[2], cold[2]["ids"]), cold[2]["ids"])
    assert (cold[2]["log_probs"] - dense).abs().max() > 10 * FP32


def test_layer_weights_are_switched_on_a_running_engine(ruled_engine, ruled_oracle, other_oracle):
    prompt = random_prompt(17, 110)
    answers = []
    for schedule in (OTHER, "chosen"):
        set_schedule(ruled_engine, schedule)
        answers.append(generate(ruled_engine, [prompt], 40)[0])
    assert_follows(other_oracle, prompt, answers[0])
    assert_follows(ruled_oracle, prompt, answers[1])
    assert (answers[0]["log_probs"] - answers[1]["log_probs"]).abs().max() > 10 * FP32


def test_layers_become_dense_on_a_running_engine(ruled_engine, ruled_oracle, sharp_llama):
    """They keep their landmarks, so that they can be sparse again."""
    rule = CHOSEN.selection.model_copy(update={"layer_weights": (0.5, 0.0, 1.5, 0.0)})
    fields = CHOSEN.model_dump() | {"name": "denser", "dense_layers": (1, 3), "selection": rule}
    denser = BudgetSchedule(**fields)
    prompts = [random_prompt(length, length) for length in (70, 130)]
    set_schedule(ruled_engine, denser)
    options = [{"report": True}, {"kv_budget_tokens": 64}]
    answers = generate(ruled_engine, prompts, 40, options=options)
    for cap, prompt, answer in zip([None, 64], prompts, answers, strict=True):
        assert_follows(ContractModel(sharp_llama, denser, cap=cap), prompt, answer)
    connect(ruled_engine).call_sparrow("landmarks")
    set_schedule(ruled_engine, "chosen")
    assert_follows(ruled_oracle, prompts[1], generate(ruled_engine, prompts[1:], 40)[0])
