"""A mixture of experts inside SGLang: sparse decode against transformers and the contract."""

from typing import Any

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


def greedy(model: str, **server_args: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and their log-probs, of all prompts in one batch."""
    with start_engine(model, chunked_prefill_size=64, **server_args) as engine:
        answers = engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
    rows = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    return [
        ([token for _, token, _ in row], torch.tensor([value for value, _, _ in row]))
        for row in rows
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang serves from the GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_decode_follows_the_contract(model: str, schedule_file: str, ranks: int) -> None:
    sparse, dense = ContractModel(model, SCHEDULE), ContractModel(model)
    answers = greedy(
        model, attention_backend="sparrow", sparrow_schedule=schedule_file, tp_size=ranks
    )
    apart = 0.0
    for prompt, (ids, found) in zip(PROMPTS, answers, strict=True):
        expected, other = (
            each.log_probs(prompt, ids).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).float()
            for each in (sparse, dense)
        )
        torch.testing.assert_close(found, expected, atol=FP32, rtol=0)
        apart = max(apart, float((expected - other).abs().max()))
    # Dense decode would fail the check above.
    assert apart > 100 * FP32
