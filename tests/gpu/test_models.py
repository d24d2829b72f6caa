"""Engines on a GPU with every kind of attention that the kernels take. SGLang keeps the KV of
gemma3's windowed layers in the common pool, that of gpt_oss in a pool of its own. gpt_oss also has
attention sinks."""

import pytest
import torch
from engines import LARGE_PAGES, SCHEDULE, greedy, random_prompt, save_tiny_model, start_engine
from oracle import ContractModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 60
# Expert kernels need rounder widths than the default ones; in bf16 a token may go to another
# expert. SGLang creates weights of gpt_oss in the dtype of the checkpoint.
SHAPES = {
    "llama": {"spread": 0.08},
    "gemma3": {"spread": 0.08},
    "gpt_oss": {
        "spread": 0.05, "hidden_size": 256, "intermediate_size": 256, "dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("kind", "head_dim", "schedule", "dense"),
    [
        *(("llama", head_dim, SCHEDULE, None) for head_dim in (64, 80, 96, 128, 256)),
        ("llama", 64, LARGE_PAGES, None),
        ("gemma3", 64, SCHEDULE, None),
        ("gemma3", 256, SCHEDULE, None),
        ("gemma3", 64, SCHEDULE, "flashinfer"),
        ("gemma3", 64, SCHEDULE, "triton"),
        ("gpt_oss", 64, SCHEDULE, None),
        ("gpt_oss", 64, SCHEDULE, "triton"),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_generation_follows_the_contract(kind, head_dim, schedule, dense, graphs, tmp_path):
    """Dense prefill in chunks, then sparse decode in the layers without a window."""
    model = save_tiny_model(tmp_path, kind, head_dim=head_dim, **SHAPES[kind])
    schedule.save(path := tmp_path / "schedule.json")
    scale = schedule.page_size // 16
    prompts = [random_prompt(length, length * scale) for length in (40, 150, 200)]
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule=str(path),
        sparrow_dense_backend=dense,
        page_size=schedule.page_size,
        dtype="bfloat16",
        chunked_prefill_size=64 * scale,
        disable_cuda_graph=not graphs,
        disable_prefill_cuda_graph=True,
    ) as engine:
        outputs = greedy(engine, prompts, NEW_TOKENS)
    near, far = (
        torch.stack([oracle.errors(*pair) for pair in zip(prompts, outputs, strict=True)])
        for oracle in (ContractModel(model, schedule), ContractModel(model))
    )
    if kind == "llama":
        # The first token comes from the dense prefill alone.
        assert float(near[:, 0].max()) < 0.15
    assert float(near.median()) < 0.05
    # Otherwise the test could not tell sparse decode from dense.
    assert float(far[1:].median()) > 2 * float(near[1:].median())
