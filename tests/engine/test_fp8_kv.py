"""Sparse decode over an FP8 KV cache, against the contract's loop on rounded keys and values."""

import torch
from engines import INT4_SCHEDULE, greedy, random_prompt, sparse, start_engine
from oracle import ContractModel

from sparrow_sglang.client.endpoint import connect

FP8 = torch.float8_e4m3fn
# A number midway between two FP8 numbers may round to either, depending on the order of fp32 sums.
CLOSE = 0.02


def test_generation_follows_the_contract_on_rounded_kv(sharp_llama):
    prompts = [random_prompt(length, length) for length in (17, 64, 190)]
    arguments = sparse(INT4_SCHEDULE) | {"chunked_prefill_size": 64}
    with start_engine(sharp_llama, kv_cache_dtype="fp8_e4m3", **arguments) as engine:
        answers = greedy(engine, prompts, 40)
        # Fails on a landmark that is not the mean of its keys.
        assert connect(engine).call_sparrow("landmarks")["pages"] > 10
    errors, of_dense, of_exact = (
        torch.cat([oracle.errors(*pair) for pair in zip(prompts, answers, strict=True)])
        for oracle in (
            ContractModel(sharp_llama, INT4_SCHEDULE, kv_dtype=FP8),
            ContractModel(sharp_llama, None, kv_dtype=FP8),
            ContractModel(sharp_llama, INT4_SCHEDULE),
        )
    )
    assert errors.max() < CLOSE
    # Dense decode, or exact keys and values, would fail the check above.
    assert of_dense.mean() > 20 * errors.mean()
    assert of_exact.mean() > 20 * errors.mean()
