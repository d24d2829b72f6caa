"""Engines on a GPU with a model in which every other layer has a sliding window."""

import pytest
import torch
from engines import SCHEDULE, random_prompt, save_tiny_model, start_engine
from oracle import ContractModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 60


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_generation_follows_the_contract(head_dim, graphs, schedule_file, tmp_path):
    """Dense prefill in chunks, then sparse decode in the layers that keep the whole KV."""
    model = save_tiny_model(tmp_path, "gemma3", spread=0.08, head_dim=head_dim)
    prompts = [random_prompt(length, length) for length in (40, 150, 200)]
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule=schedule_file,
        dtype="bfloat16",
        chunked_prefill_size=64,
        disable_cuda_graph=not graphs,
        disable_prefill_cuda_graph=True,
    ) as engine:
        outputs = engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
    oracles = ContractModel(model, SCHEDULE), ContractModel(model)
    near, far = (
        torch.stack([_errors(oracle, *pair) for pair in zip(prompts, outputs, strict=True)])
        for oracle in oracles
    )
    # The first token comes from the dense prefill alone.
    assert float(near[:, 0].max()) < 0.25
    assert float(near.median()) < 0.05
    # Or else the test could not tell sparse decode from dense.
    assert float(far[1:].median()) > 2 * float(near[1:].median())


def _errors(oracle: ContractModel, prompt: list[int], output: dict) -> torch.Tensor:
    """Distance of each token's log-prob from the oracle's, [new tokens]."""
    values, ids, _ = zip(*output["meta_info"]["output_token_logprobs"], strict=True)
    expected = oracle.log_probs(prompt, list(ids)).gather(-1, torch.tensor(ids)[:, None])
    return (torch.tensor(values, dtype=torch.float64) - expected.squeeze(-1)).abs()
