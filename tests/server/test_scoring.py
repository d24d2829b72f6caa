"""Dense re-scoring on the server that generated sparsely, against transformers."""

import numpy as np
import pytest
import torch
from engines import greedy, random_prompt, start_engine
from oracle import FP32, ContractModel, logprobs_of
from ports import free_port

from sparrow_sglang import measure_acceptance
from sparrow_sglang.client.acceptance import score_dense
from sparrow_sglang.client.endpoint import EndpointError
from sparrow_sglang.mismatch.exact_rates import response_logprobs


@pytest.fixture(scope="module")
def engine(sharp_llama, chunked):
    with start_engine(sharp_llama, **chunked) as engine:
        yield engine


@pytest.fixture(scope="module")
def log_probs(sharp_llama):
    """Dense log-probs [T, V] of the tokens after a prompt, float64."""
    return ContractModel(sharp_llama).log_probs


def assert_dense(scores, expected: torch.Tensor, response: list[int]) -> None:
    chosen = expected[range(len(response)), response]
    np.testing.assert_allclose(scores.logprobs, chosen, atol=FP32)


def test_a_sparse_generation_is_scored_as_transformers_scores_it(engine, log_probs):
    prompts = [random_prompt(seed, length) for seed, length in ((1, 20), (2, 90), (3, 130))]
    answers = greedy(engine, prompts, 150)
    sequences = [(ids, answer["output_ids"]) for ids, answer in zip(prompts, answers, strict=True)]
    cold = score_dense(engine, sequences)
    warm = score_dense(engine, sequences)  # prompts, and now responses too, are in the prefix cache
    for index, (ids, response) in enumerate(sequences):
        expected = log_probs(ids, response)
        assert_dense(cold[index], expected, response)
        assert_dense(warm[index], expected, response)
        apart = (logprobs_of(answers[index]) - expected[range(150), response]).abs()
        # The first token comes from prefill; later ones must show that decode was sparse.
        assert apart[0] < FP32 and apart.max() > 100 * FP32


def test_acceptance_of_a_batch(engine, log_probs):
    prompts = [random_prompt(seed, 100) for seed in (14, 15)]
    answers = greedy(engine, prompts, 60)
    sequences = [(ids, answer["output_ids"]) for ids, answer in zip(prompts, answers, strict=True)]
    sampled = []
    for (ids, response), answer in zip(sequences, answers, strict=True):
        ratio = log_probs(ids, response)[range(60), response] - logprobs_of(answer)
        # The first token is from prefill; all others are from sparse steps.
        sampled.append(ratio.clamp(max=0).exp()[1:])
    found = measure_acceptance(engine, sequences, answers).mean
    assert found.mean == pytest.approx(float(torch.cat(sampled).mean()), abs=1e-3)
    assert found.tokens == 2 * 59
    recorded = [logprobs_of(answer) for answer in answers]
    assert measure_acceptance(engine, sequences, recorded).mean == found
    for wrong in (answers[:1], [answers[0], {"meta_info": {}}], [recorded[0], [0.0]]):
        with pytest.raises(ValueError):
            measure_acceptance(engine, sequences, wrong)


def test_a_server_that_is_not_there():
    with pytest.raises(EndpointError):
        score_dense(f"http://127.0.0.1:{free_port()}", [([3], [4])])


def test_scores_of_other_tokens_are_refused(engine, log_probs):
    """SGLang reports the last token, 255 here, as 0."""
    ids, response = random_prompt(10, 20), [0, 7, 255]
    [scores] = score_dense(engine, [(ids, response)])
    assert_dense(scores, log_probs(ids, response), response)
    reported = [(None, 3), (-1.0, 0), (-2.0, 7), (-3.0, 0)]
    answer = {"meta_info": {"input_token_logprobs": reported}}
    assert response_logprobs(answer, response).tolist() == [-1, -2, -3]
    for wrong in ([0, 8, 255], [0, 7], [0, 7, 255, 3]):
        with pytest.raises(AssertionError):
            response_logprobs(answer, wrong)
