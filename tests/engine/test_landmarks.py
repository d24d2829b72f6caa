"""Landmarks stay right while requests come, share prefixes, are retracted, aborted and go."""

import asyncio
import random
from typing import Any

import pytest
import torch
from adapted_models import save_adapter
from engines import ON_CPU, save_tiny_model, sparse, start_engine
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
)

from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.client.endpoint import EndpointError, connect
from sparrow_sglang.schedules.schedule import INT4, BudgetSchedule

PROMPTS = 40
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
CPU = pytest.param("cpu", marks=ON_CPU)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # The smallest head that the kernels are built for.
    folder = tmp_path_factory.mktemp("landmarks")
    return save_tiny_model(folder, spread=0.15, head_dim=64, hidden_size=144)


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> str:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    return save_adapter(model, tmp_path_factory.mktemp("adapter"), 0, targets)[0]


def engine_arguments(device: str, adapter: str, schedule: Any = "fixed-96") -> dict:
    return sparse(schedule) | {
        "dtype": "bfloat16" if device == "cuda" else "float32",
        # Six requests of up to 316 tokens do not fit, so that some are retracted.
        "max_total_tokens": 512,
        "max_running_requests": 6,
        "chunked_prefill_size": 64,
        "schedule_conservativeness": 0.1,
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_paths": {"adapter": adapter},
        # Capturing prefill takes two minutes on a new machine and is not what is tested.
        "disable_prefill_cuda_graph": True,
    }


async def generate(engine, draw: random.Random, shared: list[int], number: int) -> int:
    """One request: some share a prefix, some use the adapter, some are aborted on the way. Returns
    how often it was retracted."""
    prompt = shared[: draw.choice([0, 40, 96])] + draw.choices(range(3, 250), k=draw.randint(1, 90))
    request = GenerateReqInput(
        rid=f"request-{number}",
        input_ids=prompt,
        # Without ignore_eos, for which SGLang 0.5.23 sets all tokens aside, so that none would be
        # retracted. No token ends an answer of this model.
        sampling_params={"max_new_tokens": draw.randint(1, 130)},
        lora_path=draw.choice([None, "adapter"]),
        stream=True,
    )
    abort_after = draw.choice([None, None, None, draw.randint(1, 20)])
    await asyncio.sleep(draw.random() * 2)
    seen = retractions = 0
    async for answer in engine.tokenizer_manager.generate_request(request, None):
        retractions = answer["meta_info"].get("num_retractions", 0)
        seen += 1
        if seen == abort_after:
            engine.tokenizer_manager.abort_request(f"request-{number}")
    return retractions


async def check_while_running(engine, requests: list[asyncio.Task]) -> tuple[int, int]:
    """Pause, compare every live landmark with its page, go on. Returns the number of pauses, and of
    retractions of all requests."""
    manager, checks = engine.tokenizer_manager, 0
    while not all(request.done() for request in requests):
        await asyncio.sleep(0.3)
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        await manager.sparrow.calls["landmarks"]()
        await manager.continue_generation(ContinueGenerationReqInput())
        checks += 1
    return checks, sum(await asyncio.gather(*requests))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_live_landmark_is_that_of_its_page_throughout_a_random_run(device, model, adapter):
    # When landmarks are written does not depend on their form, so the CPU tests those in int4.
    int4 = BudgetSchedule.fixed(96, selection=INT4, dense_layers=())
    schedule = int4 if device == "cpu" else "fixed-96"
    draw = random.Random(0)
    shared = draw.choices(range(3, 250), k=96)

    async def run(engine) -> tuple[int, int]:
        requests = [
            asyncio.ensure_future(generate(engine, random.Random(n), shared, n))
            for n in range(PROMPTS)
        ]
        return await check_while_running(engine, requests)

    with start_engine(model, **engine_arguments(device, adapter, schedule)) as engine:
        checks, retractions = engine.loop.run_until_complete(run(engine))
        assert checks >= 3 and retractions >= 1
        connect(engine).call_sparrow("landmarks")


@ON_CPU
def test_the_check_finds_a_landmark_that_nobody_wrote(model, adapter, monkeypatch):
    monkeypatch.setattr(TorchPagedDecode, "update_landmarks", lambda *_: None)
    with start_engine(model, **engine_arguments("cpu", adapter)) as engine:
        engine.generate(input_ids=[5] * 40, sampling_params={"max_new_tokens": 2})
        with pytest.raises(EndpointError, match="stale landmark in layer 2"):
            connect(engine).call_sparrow("landmarks")


def test_the_check_covers_the_pages_of_a_running_request(model, adapter):
    """Only its prompt is in the prefix tree; what it has decoded is its own."""

    async def pages_while_running(engine) -> int:
        manager = engine.tokenizer_manager
        sampling = {"max_new_tokens": 200, "ignore_eos": True}
        request = GenerateReqInput(input_ids=[5] * 40, sampling_params=sampling, stream=True)
        async for answer in manager.generate_request(request, None):
            if answer["meta_info"]["completion_tokens"] == 60:
                await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
                pages = (await manager.sparrow.calls["landmarks"]())["pages"]
                await manager.continue_generation(ContinueGenerationReqInput())
        return pages

    with start_engine(model, **engine_arguments("cpu", adapter)) as engine:
        pages = engine.loop.run_until_complete(pages_while_running(engine))
        assert pages >= (40 + 60 - 1) // 16
        assert connect(engine).call_sparrow("landmarks")["pages"] == 40 // 16
