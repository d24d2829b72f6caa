"""What the prefix cache holds: as many tokens of prompts as in stock SGLang, and dense KV only."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adapted_models import save_adapter
from engines import flush, last_of, random_prompt, require_whole_pool, start_engine, start_request
from oracle import FP32, ContractModel

PAGE = 16
# Sparse from 65 tokens on, so that every decoded token of these tests is.
BUDGET = "fixed-64"


@pytest.fixture(scope="module")
def adapter(sharp_llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_adapter(sharp_llama, tmp_path_factory.mktemp("adapter"), 1, ("q_proj", "v_proj"))[0]


@pytest.fixture(scope="module")
def oracle(sharp_llama: str) -> ContractModel:
    return ContractModel(sharp_llama)


def engine_of(model: str, backend: str, adapter: str) -> Any:
    schedule = {"sparrow_schedule": BUDGET} if backend == "sparrow" else {}
    return start_engine(
        model,
        attention_backend=backend,
        page_size=PAGE,
        chunked_prefill_size=64,
        max_total_tokens=4096,
        enable_lora=True,
        max_lora_rank=4,
        lora_target_modules=["q_proj", "v_proj"],
        lora_paths={"adapter": adapter},
        **schedule,
    )


@pytest.fixture(scope="module")
def sparse_engine(sharp_llama: str, adapter: str) -> Iterator[Any]:
    from sglang.srt.managers.scheduler import Scheduler

    with pytest.MonkeyPatch.context() as patch:
        # The schedulers are forked from this process.
        patch.setattr(Scheduler, "require_whole_pool", require_whole_pool, raising=False)
        with engine_of(sharp_llama, "sparrow", adapter) as engine:
            yield engine


@pytest.fixture
def engine(sparse_engine: Any) -> Iterator[Any]:
    """An engine with an empty cache; afterwards every token of the pool must be free again."""
    flush(sparse_engine)
    yield sparse_engine
    flush(sparse_engine)
    sparse_engine.collective_rpc("require_whole_pool")


def sampling(new_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True} | fields


def cached(engine: Any, prompt: list[int], lora: str | None = None) -> int:
    """Tokens of the prompt that were found in the cache."""
    answer = engine.generate(input_ids=prompt, sampling_params=sampling(1), lora_path=lora)
    count: int = answer["meta_info"]["cached_tokens"]
    return count


async def group_beside_others(engine: Any, new_tokens: int) -> list[int]:
    """Cached tokens of each sample of a request with n=4 while two others are decoded."""
    others = []
    for seed in (90, 91):
        prompt = random_prompt(seed, 40)
        other = await start_request(engine, input_ids=prompt, sampling_params=sampling(400))
        others.append(asyncio.ensure_future(last_of(other)))
    parameters = sampling(new_tokens, n=4)
    group = await engine.async_generate(input_ids=random_prompt(3, 150), sampling_params=parameters)
    assert not any(other.done() for other in others)
    engine.tokenizer_manager.abort_request(abort_all=True)
    await asyncio.gather(*others)
    return [answer["meta_info"]["cached_tokens"] for answer in group]


def test_as_many_tokens_are_found_as_in_stock_sglang(
    sharp_llama: str, adapter: str, sparse_engine: Any
) -> None:
    """Most requests here end at their prefill, under the overlap scheduler."""

    def found(engine: Any) -> dict[str, list[int]]:
        flush(engine)
        assert engine.server_args.disable_overlap_schedule is False
        # 130 and 145 tokens go through prefill in three chunks, 160 fill their last page.
        lengths = [(seed, length) for seed, length in enumerate((30, 130, 145, 160)) for _ in "ab"]
        once = [(random_prompt(seed, length), length) for seed, length in lengths]
        return {
            "one token": [cached(engine, prompt) for prompt, _ in once],
            "with an adapter": [cached(engine, prompt, lora="adapter") for prompt, _ in once],
            "longer": [cached(engine, prompt + [7] * 20) for prompt, _ in once],
            "group": engine.loop.run_until_complete(group_beside_others(engine, 30)),
            "group of one token": engine.loop.run_until_complete(group_beside_others(engine, 1)),
        }

    with engine_of(sharp_llama, "torch_native", adapter) as engine:
        stock = found(engine)
    assert stock["one token"] == [0, 16, 0, 128, 0, 144, 0, 144]
    assert stock["group"] == [144] * 4
    assert found(sparse_engine) == stock


@pytest.mark.parametrize(("length", "new_tokens"), [(150, 1), (159, 2), (144, 17), (130, 40)])
def test_no_page_with_a_generated_token_is_found_and_scores_are_dense(
    engine: Any, oracle: ContractModel, length: int, new_tokens: int
) -> None:
    prompt = random_prompt(length, length)
    first = engine.generate(input_ids=prompt, sampling_params=sampling(new_tokens))
    sequence = prompt + first["output_ids"]
    assert cached(engine, sequence + [7] * 20) == length // PAGE * PAGE
    assert_scores_are_dense(engine, oracle, prompt, first["output_ids"])


@pytest.mark.parametrize(
    ("option", "new_tokens", "found"),
    [({"kv_budget_tokens": 48}, 20, 32), (None, 20, 48), ({"dense": True}, 90, 128)],
)
def test_generated_tokens_are_found_only_after_a_request_without_a_sparse_step(
    engine: Any, option: Any, new_tokens: int, found: int
) -> None:
    prompt = random_prompt(5, 40)
    parameters = sampling(new_tokens, custom_params=option and {"sparrow": option})
    first = engine.generate(input_ids=prompt, sampling_params=parameters)
    # The KV of the last token is never written; whole pages count.
    assert cached(engine, prompt + first["output_ids"] + [7] * 20) == found


def assert_scores_are_dense(
    engine: Any, oracle: ContractModel, prompt: list[int], response: list[int]
) -> None:
    """Scores of the same server are dense, whatever its cache holds of the sequence."""
    fields = {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
    answer = engine.generate(input_ids=prompt + response, sampling_params=sampling(0), **fields)
    got = torch.tensor([value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]])
    expected = oracle.log_probs(prompt, response).gather(-1, torch.tensor(response)[:, None])
    torch.testing.assert_close(got.double(), expected.squeeze(-1).double(), atol=FP32, rtol=0)


def test_a_request_that_ends_when_it_is_prefilled_again_leaves_dense_kv(
    engine: Any, oracle: ContractModel
) -> None:
    """Every pause retracts all requests, so that each ends at a prefill, or one step later."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager = engine.tokenizer_manager
    prompts = [random_prompt(seed, 70 + 9 * seed) for seed in range(6)]

    async def interrupted() -> list[dict[str, Any]]:
        tasks = [
            asyncio.ensure_future(
                engine.async_generate(input_ids=prompt, sampling_params=sampling(20 + 3 * seed))
            )
            for seed, prompt in enumerate(prompts)
        ]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.02)
            await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            await manager.continue_generation(ContinueGenerationReqInput())
        return await asyncio.gather(*tasks)

    outputs = engine.loop.run_until_complete(interrupted())
    assert max(output["meta_info"].get("num_retractions", 0) for output in outputs) >= 3
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output["output_ids"]) == output["meta_info"]["completion_tokens"]
        assert_scores_are_dense(engine, oracle, prompt, output["output_ids"])
