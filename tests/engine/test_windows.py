"""Models in which some layers have a sliding window: sparse decode in the others only."""

import pytest
from engines import (
    INT4_SCHEDULE,
    NEEDS_GEMMA3,
    SCHEDULE,
    greedy,
    random_prompt,
    save_tiny_model,
    sparse,
    start_engine,
)
from oracle import FP32, ContractModel

from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import EndpointError, connect
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.sglang_compat.versions import LOCKED, installed_version


@pytest.fixture(scope="module", params=[pytest.param("gemma3", marks=NEEDS_GEMMA3), "gpt_oss"])
def model(request, tmp_path_factory) -> str:
    """SGLang keeps the windows of gemma3 in the same KV pool, those of gpt_oss in one of their own.
    The latter has attention sinks, too."""
    if request.param == "gpt_oss" and installed_version() != LOCKED:
        pytest.skip(f"gpt-oss needs SGLang {LOCKED} on a CPU")
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny_model(folder, request.param, spread=0.15)


@pytest.fixture(scope="module")
def engine(model):
    with start_engine(model, **sparse(SCHEDULE), chunked_prefill_size=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def dense_oracle(model) -> ContractModel:
    return ContractModel(model)


def test_layers_that_keep_everything_follow_the_contract(engine, model, dense_oracle):
    prompts = [random_prompt(length, length) for length in (1, 23, 24, 25, 64, 81, 130, 190)]
    answers, oracle = greedy(engine, prompts, 40), ContractModel(model, SCHEDULE)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.assert_greedy(prompt, answer)
    # Without this, the test could pass on a model that ignores far tokens.
    assert dense_oracle.errors(prompts[-1], answers[-1]).max() > 50 * FP32


def test_every_request_may_be_dense(engine, dense_oracle):
    """Cold, and with a prefix from the cache, which for windows holds the end of the prompt."""
    prompts = [random_prompt(30 + length, length) for length in (25, 140, 210)]
    for _ in range(2):
        answers = greedy(engine, prompts, 30, {"dense": True})
        for prompt, answer in zip(prompts, answers, strict=True):
            dense_oracle.assert_greedy(prompt, answer)
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [16, 128, 208]


def test_a_second_turn_reuses_the_prompt_but_no_sparse_written_kv(engine, dense_oracle):
    prompt = random_prompt(11, 130)
    [first] = greedy(engine, [prompt], 60)
    history = prompt + first["output_ids"] + random_prompt(12, 21)
    [second] = greedy(engine, [history], 1)
    assert second["meta_info"]["cached_tokens"] == 128
    dense_oracle.assert_greedy(history, second)
    connect(engine).call_sparrow("landmarks")


def test_a_switch_to_a_fixed_budget_keeps_the_rule(model):
    if "gemma3" in model:
        pytest.skip("gpt_oss runs it, with the same attention and a pool of its own for windows")
    prompts = [random_prompt(300 + length, length) for length in (3, 63, 100, 150)]
    with start_engine(model, **sparse(INT4_SCHEDULE), chunked_prefill_size=64) as engine:
        answers = greedy(engine, prompts, 50)
        connect(engine).call_sparrow("landmarks")
        # One budget by the same rule and in the same layers.
        set_schedule(engine, "fixed-64")
        switched = greedy(engine, prompts, 50)
        # The schedule that was read can be set again, but not one that is dense on this model.
        set_schedule(engine, get_schedule(engine))
        dense = {"dense_layers": (1, 3, 5)}
        with pytest.raises(EndpointError, match="no layer of the model would be sparse"):
            set_schedule(engine, BudgetSchedule(**INT4_SCHEDULE.model_dump() | dense))
    fixed = {"name": "fixed-64", "bin_tokens": 16, "budget_tokens": (64,)}
    for schedule, some in (
        (INT4_SCHEDULE, answers),
        (BudgetSchedule(**INT4_SCHEDULE.model_dump() | fixed), switched),
    ):
        oracle = ContractModel(model, schedule)
        for prompt, answer in zip(prompts, some, strict=True):
            oracle.assert_greedy(prompt, answer)
