"""A mixture of experts inside SGLang: sparse decode against transformers and the contract."""

import pytest
import torch
from engines import SCHEDULE, random_prompt, save_tiny_model, start_engine
from oracle import ContractModel

PROMPTS = [random_prompt(seed, length) for seed, length in ((1, 70), (2, 100), (3, 33))]
NEW_TOKENS = 100
FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight experts in each layer, two to a token; heads for two ranks.

    No dense layers: SGLang 0.5.17 pays no heed to `mlp_only_layers` of this architecture.
    """
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"norm_topk_prob": True}
    folder = tmp_path_factory.mktemp("tiny-qwen3-moe")
    return save_tiny_model(folder, "qwen3_moe", spread=0.15, **shape, **experts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang serves from the GPU")
def test_two_ranks_follow_the_contract(model: str, schedule_file: str) -> None:
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule=schedule_file,
        tp_size=2,
        chunked_prefill_size=64,
    ) as engine:
        answers = engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
    sparse, dense = ContractModel(model, SCHEDULE), ContractModel(model)
    pairs = list(zip(PROMPTS, answers, strict=True))
    assert max(sparse.errors(*pair).max() for pair in pairs) < FP32
    # Dense decode would fail the check above.
    assert max(dense.errors(*pair).max() for pair in pairs) > 100 * FP32
