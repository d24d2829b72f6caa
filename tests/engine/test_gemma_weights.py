"""Gemma 3 270M, for those who have installed its package: sparse decode against the contract."""

import pytest
import torch
from engines import start_engine
from oracle import ContractModel

from sparrow_sglang import gemma
from sparrow_sglang.models import model_folder
from sparrow_sglang.schedule import BudgetSchedule

pytestmark = [
    pytest.mark.skipif(not gemma.is_installed(), reason=f"needs {gemma.PACKAGE}"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="in float32, which GPU kernels do not take"
    ),
]
FP32 = 5e-4  # |difference| of a log-prob; most seen: 1.3e-4
NEW_TOKENS = 16


def test_sparse_decode_follows_the_contract() -> None:
    """The prompt is longer than the model's windows of 512 tokens."""
    from transformers import AutoTokenizer

    model, schedule = model_folder(gemma.NAME), BudgetSchedule.fixed(256)
    text = (gemma.__doc__ or "") + "\n".join(str(number) for number in range(250))
    prompt = AutoTokenizer.from_pretrained(model)(text).input_ids[:720]
    assert len(prompt) == 720
    with start_engine(
        model, attention_backend="sparrow", sparrow_schedule=schedule.name, max_total_tokens=2048
    ) as engine:
        answer = engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
    assert ContractModel(model, schedule).errors(prompt, answer).max() < FP32
    # Dense decode would fail the check above.
    assert ContractModel(model).errors(prompt, answer).max() > 10 * FP32
