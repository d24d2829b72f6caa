"""Dense decode steps in captured graphs, and the timing that chooses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import random_prompt, save_tiny_model, start_engine

from sparrow_sglang.client.control import get_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.plugin import dense_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DENSE_TOKENS = 352
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((40, 129, 300))]


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "triton"])
def test_short_requests_decode_as_stock_does_until_steps_are_sparse(
    dense: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave the landmarks of a prefill. The timing runs, but its result is replaced."""
    model = save_tiny_model(
        tmp_path,
        spread=0.15,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "page_size": 16,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": [1, 2, 4],
        "max_running_requests": 8,
        "max_total_tokens": 32768,
    }

    def answers(engine: Any) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": 400}
        generated = [
            engine.generate(input_ids=batch, sampling_params=sampling)
            for batch in (PROMPTS[:1], PROMPTS[1:2], PROMPTS)
        ]
        return [answer["output_ids"] for batch in generated for answer in batch]

    with start_engine(model, attention_backend=dense, **common) as engine:
        stock = answers(engine)
    measure = dense_steps.measure_dense_tokens

    def measured(runner: Any) -> int:
        assert 0 <= measure(runner) <= 4096
        return DENSE_TOKENS

    monkeypatch.setattr(dense_steps, "measure_dense_tokens", measured)
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule="fixed-64",
        sparrow_dense_backend=dense,
        **common,
    ) as engine:
        answered = answers(engine)
        assert get_schedule(engine).dense_tokens == DENSE_TOKENS
        connect(engine).call_sparrow("landmarks")
    assert f"dense up to {DENSE_TOKENS} tokens" in capfd.readouterr().err
    # A batch leaves the stock kernel when its longest request does.
    longest = [len(PROMPTS[0]), len(PROMPTS[1]), *3 * [len(PROMPTS[2])]]
    for ids, dense_ids, length in zip(answered, stock, longest, strict=True):
        equal = DENSE_TOKENS - length + 1
        assert ids[:equal] == dense_ids[:equal]
    assert answered[:2] != stock[:2]
