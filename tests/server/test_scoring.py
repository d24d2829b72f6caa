"""Dense re-scoring on the server that generated sparsely, against transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from engines import random_prompt, start_engine
from oracle import FP32
from ports import free_port
from transformers import AutoModelForCausalLM

from sparrow_sglang import measure_acceptance
from sparrow_sglang.client.acceptance import score_dense
from sparrow_sglang.client.endpoint import EndpointError, connect
from sparrow_sglang.mismatch.acceptance import acceptance_rate
from sparrow_sglang.mismatch.scores import (
    SparseScores,
    dense_scores,
    recorded_scores,
    scoring_request,
)

# Small enough that most sequences below take several prefill chunks.
CHUNK = 64


def sample(target, prompts: list[list[int]], new_tokens: int, **fields) -> list[dict]:
    return connect(target).generate(
        [
            {
                "input_ids": ids,
                "sampling_params": {
                    "temperature": 1.0,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "top_logprobs_num": 20,
            }
            | fields
            for ids in prompts
        ]
    )


@pytest.fixture(scope="module")
def arguments(schedule_file) -> dict:
    return {
        "attention_backend": "sparrow",
        "sparrow_schedule": schedule_file,
        "chunked_prefill_size": CHUNK,
    }


@pytest.fixture(scope="module")
def engine(sharp_llama, arguments):
    with start_engine(sharp_llama, **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def log_probs(sharp_llama):
    """Dense log-probs [T, V] of the tokens after a prompt, float64."""
    model = AutoModelForCausalLM.from_pretrained(sharp_llama, dtype=torch.float64).eval()

    @torch.no_grad()
    def compute(ids: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([ids + response])).logits[0]
        return logits.log_softmax(-1)[len(ids) - 1 : -1]

    return compute


def assert_dense(scores, expected: torch.Tensor, response: list[int]) -> None:
    chosen = expected[range(len(response)), response]
    np.testing.assert_allclose(scores.logprobs, chosen, atol=FP32)
    top = expected.topk(scores.top_ids.shape[1])
    np.testing.assert_allclose(scores.top_logprobs, top.values, atol=FP32)
    # By log-prob, not by id: near-ties may swap places.
    listed = expected.gather(1, torch.from_numpy(scores.top_ids))
    np.testing.assert_allclose(scores.top_logprobs, listed, atol=FP32)


def test_a_sparse_generation_is_scored_as_transformers_scores_it(engine, log_probs):
    prompts = [random_prompt(seed, length) for seed, length in ((1, 20), (2, 90), (3, 130))]
    answers = sample(engine, prompts, 150)
    sequences = [(ids, answer["output_ids"]) for ids, answer in zip(prompts, answers, strict=True)]
    cold = score_dense(engine, sequences)
    warm = score_dense(engine, sequences)  # prompts, and now responses too, are in the prefix cache
    for index, (ids, response) in enumerate(sequences):
        expected = log_probs(ids, response)
        assert_dense(cold[index], expected, response)
        assert_dense(warm[index], expected, response)
        recorded = recorded_scores(answers[index])
        assert isinstance(recorded, SparseScores) and recorded.top_ids.shape == (150, 20)
        chosen = expected[range(150), response].numpy()
        # The first token comes from prefill; later ones must show that decode was sparse.
        assert abs(recorded.logprobs[0] - chosen[0]) < FP32
        assert np.abs(recorded.logprobs - chosen).max() > 100 * FP32


def test_acceptance_of_a_batch(engine, log_probs):
    """Against exact rates of the same tokens, from whole distributions of both sides."""
    prompts = [random_prompt(seed, 100) for seed in (14, 15)]
    answers = sample(engine, prompts, 60, top_logprobs_num=256)
    sequences = [(ids, answer["output_ids"]) for ids, answer in zip(prompts, answers, strict=True)]
    recorded = [recorded_scores(answer) for answer in answers]
    exact, sampled = [], []
    for (ids, response), whole in zip(sequences, recorded, strict=True):
        sparse = np.full((60, 256), -np.inf)
        np.put_along_axis(sparse, whole.top_ids, whole.top_logprobs, axis=1)
        dense = log_probs(ids, response)
        exact.append(acceptance_rate(torch.from_numpy(sparse), dense).numpy())
        ratio = dense[range(60), response].numpy() - whole.logprobs
        # The first token is from prefill; all others are from sparse steps.
        sampled.append(np.exp(np.minimum(ratio, 0))[1:])
    found = measure_acceptance(engine, sequences, answers)
    assert found.mean.mean == pytest.approx(np.concatenate(sampled).mean(), abs=1e-3)
    for bounds, rates in zip(found.bounds, exact, strict=True):
        assert (bounds.lower <= rates + 1e-4).all() and (rates <= bounds.upper + 1e-4).all()
    # Steps of up to 7 and of 8 to 10 pages, in two sequences; the tail is the 5th percentile.
    assert found.lower.tokens() == found.upper.tokens() == {1: 2 * 12, 2: 2 * 47}
    tails = zip(found.lower.bins(), found.upper.bins(), strict=True)
    for (lower, upper), part in zip(tails, (slice(1, 13), slice(13, 60)), strict=True):
        rates = np.sort(np.concatenate([one[part] for one in exact]))
        tail = rates[-(-len(rates) // 20) - 1]
        assert lower.tail - 1e-3 <= tail <= upper.tail + 1e-3
    # Without lists only the mean is known; scores that were read before are as good as answers.
    plain = measure_acceptance(engine, sequences, [one.logprobs for one in recorded])
    assert plain.mean == found.mean and plain.lower is plain.upper is plain.bounds is None
    assert measure_acceptance(engine, sequences, recorded).mean == found.mean
    short: list[Any] = [recorded[0].logprobs, [0.0]]
    for wrong in (answers[:1], [answers[0], recorded[1].logprobs], short):
        with pytest.raises(ValueError):
            measure_acceptance(engine, sequences, wrong)


def test_a_server_that_is_not_there():
    with pytest.raises(EndpointError):
        score_dense(f"http://127.0.0.1:{free_port()}", [([3], [4])])


def test_scores_of_other_tokens_are_refused(engine, log_probs):
    """SGLang reports the last token, 255 here, as 0; no other token may pass for 0."""
    ids, response = random_prompt(10, 20), [0, 7, 255]
    (answer,) = connect(engine).generate([scoring_request(ids, response, 256, "of other tokens")])
    reported = [entry[1] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    assert reported == [0, 7, 0]
    assert_dense(dense_scores(answer, response), log_probs(ids, response), response)
    for wrong in ([9, 7, 255], [0, 7, 254], [0, 8, 255], [0, 7], [0, 7, 255, 3]):
        with pytest.raises(ValueError):
            dense_scores(answer, wrong)
