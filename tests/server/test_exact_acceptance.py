"""Acceptance rates computed in the server, against transformers in float64 and the contract."""

import itertools
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from engines import SCHEDULE, random_prompt, start_engine
from oracle import ContractModel

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.mismatch.exact_rates import (
    comparing_request,
    exact_rates,
    record_into,
    recording,
)

SLOTS, STEPS = 6, 48
REPORT = {"sparrow": {"report": True}}


@pytest.fixture(scope="module")
def engine(sharp_llama, chunked):
    with ExitStack() as stack:
        with recording(SLOTS, STEPS):
            engine = stack.enter_context(start_engine(sharp_llama, **chunked))
        yield engine


def measured(engine, prompts: list[list[int]], lengths: list[int]) -> list:
    """Responses and their rates, of sampled generations that run together."""
    endpoint = connect(engine)
    recorded = []
    for slot, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        custom = record_into(slot, len(prompt)) | REPORT
        parameters = {"max_new_tokens": length, "custom_params": custom}
        recorded.append({"input_ids": prompt, "sampling_params": parameters})
    answers = endpoint.generate(recorded)
    responses = [answer["output_ids"] for answer in answers]
    reports = [answer["meta_info"]["sparrow"] for answer in answers]
    requests = [
        comparing_request(slot, prompt, response)
        for slot, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    rates = [exact_rates(answer) for answer in endpoint.generate(requests)]
    for prompt, found, report in zip(prompts, rates, reports, strict=True):
        # A step without a rate was a prefill.
        cached = [len(prompt) + step for step in 1 + np.flatnonzero(~np.isnan(found))]
        assert report["decode_steps"] == len(cached)
        assert report["kv_tokens_cached_mean"] == round(np.mean(cached), 1)
    return list(zip(responses, rates, strict=True))


def test_rates_equal_those_of_both_whole_distributions_in_float64(engine, sharp_llama) -> None:
    sparse, dense = ContractModel(sharp_llama, SCHEDULE), ContractModel(sharp_llama)
    # Prompts end on either side of page and bin edges, over several chunks; one comes twice.
    prompts = [random_prompt(i, n) for i, n in enumerate((47, 64, 201))]
    prompts.append(prompts[2])
    lengths = [48, 17, 48, 40]
    low = 1.0
    for _ in ("cold", "warm"):
        found = measured(engine, prompts, lengths)
        for prompt, length, (response, rates) in zip(prompts, lengths, found, strict=True):
            p, q = (torch.exp(m.log_probs(prompt, response)) for m in (sparse, dense))
            expected = torch.minimum(p, q).sum(-1)[1:]
            assert len(rates) == length - 1
            np.testing.assert_allclose(rates, expected, atol=1e-4)
            low = min(low, rates.min())
    assert low < 0.9


def test_answers_of_the_same_batch_hold_no_rates_of_others(engine) -> None:
    prompt = random_prompt(3, 20)
    [(response, _)] = measured(engine, [prompt], [10])
    other = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 5}}
    requests = [other, comparing_request(0, prompt, response), other]
    plain, compared, last = connect(engine).generate(requests)
    assert len(exact_rates(compared)) == 9
    assert not {"sparrow_acceptance"} & (plain["meta_info"].keys() | last["meta_info"].keys())


def test_the_step_that_a_retraction_turns_into_a_prefill_has_no_rate(sharp_llama, chunked) -> None:
    """Six requests of 60 + 100 tokens in a pool of 512: some are retracted and prefilled again."""
    sparse, dense = ContractModel(sharp_llama, SCHEDULE), ContractModel(sharp_llama)
    prompts, lengths = [random_prompt(20 + i, 60) for i in range(6)], [100] * 6
    retractions = 0
    with (
        recording(SLOTS, 100),
        start_engine(
            sharp_llama, max_total_tokens=512, schedule_conservativeness=0.1, **chunked
        ) as small,
    ):
        # Run twice, so that a slot holds states of an earlier generation.
        for _ in range(2):
            for prompt, (response, rates) in zip(
                prompts, measured(small, prompts, lengths), strict=True
            ):
                assert len(rates) == 99
                prefilled = [0, *(1 + np.flatnonzero(np.isnan(rates))), 100]
                expected = np.full(100, np.nan)
                for start, end in itertools.pairwise(prefilled):
                    before, after = prompt + response[:start], response[start:end]
                    p, q = (torch.exp(m.log_probs(before, after)) for m in (sparse, dense))
                    # The first of these tokens comes out of the prefill.
                    expected[start + 1 : end] = torch.minimum(p, q).sum(-1)[1:]
                np.testing.assert_allclose(rates, expected[1:], atol=1e-4)
                retractions += len(prefilled) - 2
    # These are retractions over 1,188 tokens.
    assert 2 <= retractions <= 12


def test_a_slot_that_the_server_does_not_have_is_an_error_of_its_reader(engine) -> None:
    with pytest.raises(AssertionError):
        measured(engine, [random_prompt(i, 70) for i in range(SLOTS + 1)], [4] * 7)
    for place in ([-1, 70], [0, 2**70], [0], "0", [0.5, 70], [None, 70], 3):
        parameters = {"max_new_tokens": 2, "custom_params": {"sparrow_record": place}}
        request = {"input_ids": random_prompt(1, 70), "sampling_params": parameters}
        [answer] = connect(engine).generate([request])
        assert len(answer["output_ids"]) == 2
    [(_, rates)] = measured(engine, [random_prompt(1, 70)], [4])
    assert len(rates) == 3 and not np.isnan(rates).any()
