"""Engines on a GPU with every head dimension and page size that the kernels take."""

import pytest
import torch
from engines import LARGE_PAGES, SCHEDULE, random_prompt, save_tiny_model, start_engine
from oracle import ContractModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 60


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "schedule"),
    [
        *((head_dim, SCHEDULE) for head_dim in (64, 80, 96, 128, 256)),
        (64, LARGE_PAGES),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_generation_follows_the_contract(head_dim, schedule, graphs, tmp_path):
    """Dense prefill in chunks, then sparse decode; head_dim 64 shows the error of bf16 alone."""
    model = save_tiny_model(tmp_path, spread=0.08, head_dim=head_dim)
    schedule.save(path := tmp_path / "schedule.json")
    scale = schedule.page_size // 16
    prompts = [random_prompt(length, length * scale) for length in (40, 150, 200)]
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule=str(path),
        page_size=schedule.page_size,
        dtype="bfloat16",
        chunked_prefill_size=64 * scale,
        disable_cuda_graph=not graphs,
        disable_prefill_cuda_graph=True,
    ) as engine:
        outputs = engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
    sparse, dense = ContractModel(model, schedule), ContractModel(model)
    near, far = (
        [oracle.errors(*pair) for pair in zip(prompts, outputs, strict=True)]
        for oracle in (sparse, dense)
    )
    # The first token comes from the dense prefill alone.
    assert max(float(each[0]) for each in near) < 0.15
    assert float(torch.cat(near).median()) < 0.05
    # Otherwise the test could not tell sparse decode from dense.
    assert float(torch.cat(far[1:]).median()) > 2 * float(torch.cat(near[1:]).median())
