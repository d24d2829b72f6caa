"""The audit of a running server: what it measures and keeps, and that users do not notice."""

import math
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from audits import outcomes, unseen_audits
from engines import SCHEDULE, random_prompt, start_engine, weight_updates
from oracle import ContractModel
from servers import sparrow_metrics, start_server
from waiting import wait_until

from sparrow_sglang.client.endpoint import connect

PLAIN = {"temperature": 1.0, "max_new_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def arguments(chunked: dict) -> dict:
    return chunked | {"sparrow_audit_rate": 1.0}


def test_an_audited_server(sharp_llama, arguments):
    """Gauges equal transformers, answers are what they are without the audit."""
    prompts = {60: random_prompt(1, 60), 130: random_prompt(2, 130)}
    requests = [
        {"input_ids": ids, "sampling_params": PLAIN, "rid": f"plain-{length}"}
        for length, ids in prompts.items()
    ]
    wants_logprobs = {"return_logprob": True, "top_logprobs_num": 3}
    # As in the generation_config.json of Qwen3; lists at this temperature are the user's.
    qwen = PLAIN | {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    asked = requests[0] | wants_logprobs | {"rid": "asked", "sampling_params": qwen}
    not_audited = {"sampling_params": qwen | {"custom_params": {"sparrow": {"dense": True}}}}
    with start_server(sharp_llama, enable_metrics=True, **arguments) as url:
        endpoint = connect(url)
        answers = endpoint.generate([*requests, asked])
        others = endpoint.generate(
            [
                requests[0] | not_audited | {"rid": "skipped-1"},
                asked | not_audited | {"rid": "skipped-2"},
            ]
        )
        greedy = qwen | {"temperature": 0.0, "repetition_penalty": 1.3}
        [certain] = endpoint.generate([requests[0] | {"sampling_params": greedy, "rid": "greedy"}])
        outcome = 'sparrow:audit_requests{outcome="audited"}'
        wait_until(lambda: sparrow_metrics(url).get(outcome) == 4)
        found = sparrow_metrics(url)

    for audited, other in ((answers[0], others[0]), (answers[2], others[1])):
        assert audited.keys() == other.keys()
        assert audited["meta_info"].keys() == other["meta_info"].keys()
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    rows_of_k = answers[2]["meta_info"]["output_top_logprobs"]
    assert len(rows_of_k) == 100 and {len(row) for row in rows_of_k} == {3}

    assert found['sparrow:audit_requests{outcome="skipped_own_schedule"}'] == 2
    sparse, dense = ContractModel(sharp_llama, SCHEDULE), ContractModel(sharp_llama)
    rates = defaultdict(list)
    for answer, length in zip([*answers, certain], (60, 130, 60, 60), strict=True):
        response = answer["output_ids"]
        p, q = (model.log_probs(prompts[length], response).exp() for model in (sparse, dense))
        # The first token of a response is from prefill.
        for cached, rate in enumerate(torch.minimum(p, q).sum(-1).tolist()[1:], length + 1):
            read_by_all = -(-cached // 16) * 16
            # What fits into the budget is read whole.
            if SCHEDULE.budget_tokens[read_by_all // 64] < read_by_all:
                rates[read_by_all // 64].append(rate)
    assert 0 < sum(map(len, rates.values())) < 4 * 99
    for index, budget in enumerate(SCHEDULE.budget_tokens):
        bin_label = f'{{bin="{index}"}}'
        assert found[f"sparrow:kv_budget_tokens{bin_label}"] == budget
        inside = sorted(rates[index])
        assert found.get(f"sparrow:audited_tokens{bin_label}", 0) == len(inside)
        if inside:
            mean, tail = sum(inside) / len(inside), inside[math.ceil(len(inside) / 20) - 1]
            assert found[f"sparrow:acceptance_mean{bin_label}"] == pytest.approx(mean, abs=1e-4)
            # Tails are read off a grid of 2,000 cells.
            assert found[f"sparrow:acceptance_tail{bin_label}"] == pytest.approx(tail, abs=5e-4)
    assert found["sparrow:kv_tokens_cached"] == found["sparrow:kv_tokens_read"] == 0


@pytest.fixture(scope="module")
def engine(sharp_llama, arguments):
    with unseen_audits(), start_engine(sharp_llama, **arguments) as engine:
        yield engine


def generate(engine, count: int, length: int, **more) -> list[dict]:
    requests = [{"input_ids": random_prompt(seed, length)} for seed in range(count)]
    sampling = PLAIN | {"max_new_tokens": 60}
    return connect(engine).generate([r | {"sampling_params": sampling, **more} for r in requests])


def test_weights_change_at_once_after_answers_with_audits_queued(engine, sharp_llama):
    """An update, and a check that may overwrite the weights, find the scheduler idle."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    before = outcomes(engine)
    name = "model.norm.weight"
    weight = torch.tensor(engine.get_weights_by_name(name, 100_000))
    check = CheckWeightsReqInput(action="reset_tensors")
    updates = [lambda: engine.update_weights_from_tensor([(name, weight)])] * 2
    changes = [
        *updates,
        lambda: engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(check)),
        lambda: engine.update_weights_from_disk(sharp_llama),
    ]
    for change in changes:
        generate(engine, 4, 400)
        with weight_updates(engine) if change in updates else nullcontext():
            assert change()[0]
        # None is left to be scored by the new weights.
        after = outcomes(engine, wait_s=0.0)
        assert after["audited"] + after["dropped"] - before["audited"] - before["dropped"] == 4
        before = after
    assert outcomes(engine) == before
