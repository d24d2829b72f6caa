"""Dense decode steps in captured graphs, and the timing that chooses them."""

from typing import Any

import pytest
import torch
from engines import random_prompt, save_tiny_model, start_engine

from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.schedules.schedule import BudgetSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DENSE_TOKENS = 352
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((40, 129, 300))]


COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "page_size": 16,
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 2, 4],
    "max_running_requests": 8,
    "max_total_tokens": 32768,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(
        tmp_path_factory.mktemp("dense"),
        spread=0.15,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "triton"])
def test_short_requests_decode_as_stock_does_until_steps_are_sparse(dense: str, model: str) -> None:
    """And leave the landmarks of a prefill."""

    def answers(engine: Any) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": 400}
        generated = [
            engine.generate(input_ids=batch, sampling_params=sampling)
            for batch in (PROMPTS[:1], PROMPTS[1:2], PROMPTS)
        ]
        return [answer["output_ids"] for batch in generated for answer in batch]

    with start_engine(model, attention_backend=dense, **COMMON) as engine:
        stock = answers(engine)
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule="fixed-64",
        sparrow_dense_backend=dense,
        **COMMON,
    ) as engine:
        set_schedule(engine, BudgetSchedule.fixed(64).dense_below(DENSE_TOKENS))
        assert get_schedule(engine).dense_tokens == DENSE_TOKENS
        answered = answers(engine)
        connect(engine).call_sparrow("landmarks")
    # A batch leaves the stock kernel when its longest request does.
    longest = [len(PROMPTS[0]), len(PROMPTS[1]), *3 * [len(PROMPTS[2])]]
    for ids, dense_ids, length in zip(answered, stock, longest, strict=True):
        equal = DENSE_TOKENS - length + 1
        assert ids[:equal] == dense_ids[:equal]
    assert answered[:2] != stock[:2]


def test_the_measured_length_is_announced(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    fields = {"input_ids": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    with start_engine(
        model, attention_backend="sparrow", sparrow_schedule="fixed-64", measured=True, **COMMON
    ) as engine:
        before = engine.generate(**fields)["output_ids"]
        dense_tokens = get_schedule(engine).dense_tokens
        assert 0 <= dense_tokens <= 4096 and dense_tokens % 16 == 0
        # The timing left nothing behind.
        connect(engine).call_sparrow("landmarks")
        assert engine.generate(**fields)["output_ids"] == before
    line = f"decode is dense up to {dense_tokens:,} tokens"
    assert (line in capfd.readouterr().err) == (dense_tokens > 0)
