"""The audit of a running server: what it measures and keeps, and that users do not notice."""

import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from audits import outcomes
from engines import SCHEDULE, random_prompt, start_engine, weight_updates
from oracle import ContractModel
from servers import sparrow_metrics, start_server
from transformers import AutoModelForCausalLM
from waiting import wait_until

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.plugin.launcher.audit import mismatch_log
from sparrow_sglang.plugin.launcher.audit.mismatch_log import read_mismatch_log

FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64
PLAIN = {"temperature": 1.0, "max_new_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def arguments(chunked: dict) -> dict:
    return chunked | {"sparrow_audit_rate": 1.0}


def test_an_audited_server(sharp_llama, arguments, tmp_path, monkeypatch):
    """Rows equal transformers, gauges equal rows, answers are what they are without the audit."""
    log = tmp_path / "log"
    # The server is forked from this process.
    monkeypatch.setattr(mismatch_log, "FLUSH_S", 0.5)
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
    with start_server(
        sharp_llama, sparrow_audit_log=str(log), enable_metrics=True, **arguments
    ) as url:
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
        wait_until(lambda: read_mismatch_log(log).num_rows == 400)
        found = sparrow_metrics(url)

    for audited, other in ((answers[0], others[0]), (answers[2], others[1])):
        assert audited.keys() == other.keys()
        assert audited["meta_info"].keys() == other["meta_info"].keys()
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    rows_of_k = answers[2]["meta_info"]["output_top_logprobs"]
    assert len(rows_of_k) == 100 and {len(row) for row in rows_of_k} == {3}

    contract = ContractModel(sharp_llama, SCHEDULE)
    model = AutoModelForCausalLM.from_pretrained(sharp_llama, dtype=torch.float64).eval()
    table = read_mismatch_log(log).to_pandas()
    assert set(table.request_id) == {"plain-60", "plain-130", "asked", "greedy"}
    lengths = (60, 130, 60, 60)
    for answer, length in zip([*answers, certain], lengths, strict=True):
        ids = prompts[length]
        rows = table[table.request_id == answer["meta_info"]["id"]]
        response = answer["output_ids"]
        assert rows.token_id.tolist() == response
        assert rows.position.tolist() == list(range(len(ids), len(ids) + 100))
        with torch.no_grad():
            dense = model(torch.tensor([ids + response])).logits[0].log_softmax(-1)
        chosen = dense[len(ids) - 1 : -1][range(100), response].numpy()
        np.testing.assert_allclose(rows.dense_logprob, chosen, atol=FP32)
        budgets = [SCHEDULE.budget_at(length) for length in rows.position]
        assert rows.kv_budget_tokens.tolist() == budgets
        sparse = contract.log_probs(ids, response)
        rates = torch.minimum(sparse.exp(), dense[len(ids) - 1 : -1].exp()).sum(-1).numpy()
        np.testing.assert_allclose(rows.acceptance_rate[1:], rates[1:], atol=1e-4)
    assert found['sparrow:audit_requests{outcome="skipped_own_schedule"}'] == 2
    # The first token of a response is from prefill, and what fits into the budget is read whole.
    pages = -(-table.position // 16)
    bins = pages * 16 // 64
    read = np.minimum(pages, np.array(SCHEDULE.budget_tokens)[bins] // 16)
    first = table.groupby("request_id").position.transform("min")
    sparse = (read < pages) & (table.position > first)
    assert 0 < sparse.sum() < len(table)
    for index in range(4):
        inside = table[sparse & (bins == index)]
        if not len(inside):
            assert f'sparrow:audited_tokens{{bin="{index}"}}' not in found
            continue
        assert found[f'sparrow:audited_tokens{{bin="{index}"}}'] == len(inside)
        labels, mean = f'{{bin="{index}"}}', inside.acceptance_rate.mean()
        assert found[f"sparrow:acceptance_mean{labels}"] == pytest.approx(mean, abs=1e-4)
        assert 0 < found[f"sparrow:acceptance_tail{labels}"] < mean
        assert found[f'sparrow:kv_budget_tokens{{bin="{index}"}}'] == SCHEDULE.budget_tokens[index]
    assert found["sparrow:kv_tokens_cached"] == found["sparrow:kv_tokens_read"] == 0


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("audit") / "log"


@pytest.fixture(scope="module")
def engine(sharp_llama, arguments, log):
    with start_engine(sharp_llama, sparrow_audit_log=str(log), **arguments) as engine:
        yield engine


def generate(engine, count: int, length: int, **more) -> list[dict]:
    requests = [{"input_ids": random_prompt(seed, length)} for seed in range(count)]
    sampling = PLAIN | {"max_new_tokens": 60}
    return connect(engine).generate([r | {"sampling_params": sampling, **more} for r in requests])


def since(before: dict[str, int], engine) -> dict[str, int]:
    return {name: count - before[name] for name, count in outcomes(engine).items()}


def test_weights_change_at_once_after_answers_with_audits_queued(engine, sharp_llama, log):
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
    assert read_mismatch_log(log).num_rows == before["audited"] * 60


def test_a_lost_log_folder_ends_the_audit(engine, log, warnings):
    before = outcomes(engine)
    shutil.rmtree(log)
    generate(engine, 1, 60)
    assert since(before, engine)["audited"] == 1
    generate(engine, 2, 60)
    assert since(before, engine) == {"audited": 1, "dropped": 0, "failed": 0}
    errors = [record for record in warnings.records if record.levelno == logging.ERROR]
    # caplog sees a record twice where the logger also propagates.
    assert len(set(map(id, errors))) == 1
    assert "the audit is off from now on, the server goes on" in errors[0].getMessage()
