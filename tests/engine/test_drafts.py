"""Several tokens a step: what users get is what plain sparse decode gives, in fewer steps."""

import asyncio
import itertools
import random
from unittest import mock

import pytest
import torch
from engines import SCHEDULE, random_prompt, start_engine
from oracle import ContractModel
from scipy.stats import chisquare

from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.plugin.drafting.rows import RowsChoice

DRAFTS = 3
FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64
PATTERN = [7, 9, 11, 13, 17, 19, 23, 29, 31, 37]


@pytest.fixture(scope="module")
def adapter(sharp_llama, tmp_path_factory) -> str:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(AutoModelForCausalLM.from_pretrained(sharp_llama), config).save_pretrained(
        folder
    )
    return str(folder)


def arguments(schedule: str, adapter: str, drafts: int) -> dict:
    return {
        "attention_backend": "sparrow",
        "sparrow_schedule": f"{schedule},fixed-96",
        "sparrow_draft_tokens": drafts,
        "chunked_prefill_size": 64,
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_paths": {"adapter": adapter},
    }


ALONE = [random_prompt(seed, length) for seed, length in enumerate((20, 63, 128, 150))]
MIXED = {
    "prompts": [random_prompt(seed, 150) for seed in range(40, 44)] * 2,
    "options": [None, {"dense": True}, {"kv_budget_tokens": 64}, {"schedule": "fixed-96"}] * 2,
    "lora": [None, "adapter", None, "adapter", "adapter", None, "adapter", None],
}


@pytest.fixture(scope="module")
def plain(sharp_llama, schedule_file, adapter) -> dict[str, list]:
    """What a server without drafts answers; SGLang cannot run both in one process at once."""
    with start_engine(sharp_llama, **arguments(schedule_file, adapter, 0)) as engine:
        answers = {"alone": generate(engine, ALONE, 100), "mixed": generate(engine, **MIXED)}
        set_schedule(engine, "fixed-96")
        return answers | {"switched": generate(engine, ALONE[3:], 60)}


@pytest.fixture(scope="module")
def engine(plain, sharp_llama, schedule_file, adapter):
    """All numbers of rows come up, one after the other, whatever steps take here."""
    cycle = itertools.cycle([4, 4, 2, 4, 4, 1])
    with (
        mock.patch.object(RowsChoice, "choose", lambda self, batch: next(cycle)),
        start_engine(sharp_llama, **arguments(schedule_file, adapter, DRAFTS)) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def oracle(sharp_llama) -> ContractModel:
    return ContractModel(sharp_llama, SCHEDULE)


def generate(
    engine, prompts: list, new_tokens: int = 60, options=None, lora=None, **sampling
) -> list:
    """Token ids, log-probs and `meta_info` of each answer; greedy unless `sampling` says other."""
    options = options or [None] * len(prompts)
    answers = engine.generate(
        input_ids=prompts,
        sampling_params=[
            {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            | ({"custom_params": {"sparrow": option}} if option else {})
            | sampling
            for option in options
        ],
        return_logprob=True,
        lora_path=lora,
    )
    found = []
    for answer in answers:
        pairs = answer["meta_info"]["output_token_logprobs"]
        ids = [token for _, token, _ in pairs]
        assert answer["output_ids"] == ids
        found.append((ids, torch.tensor([value for value, _, _ in pairs]), answer["meta_info"]))
    return found


def assert_same(found: list, expected: list) -> None:
    for (ids, log_probs, _), (plain_ids, plain_log_probs, _) in zip(found, expected, strict=True):
        assert ids == plain_ids
        torch.testing.assert_close(log_probs, plain_log_probs, atol=FP32, rtol=0)


def test_drafts_that_are_right_give_the_same_in_a_third_of_the_steps(engine, plain):
    """The second request of a prompt drafts from the answer to the first: an oracle."""
    first = generate(engine, ALONE, 100)
    second = generate(engine, ALONE, 100)
    assert_same(first, plain["alone"])
    assert_same(second, plain["alone"])
    for (_, _, meta), prompt in zip(second, ALONE, strict=True):
        assert meta["completion_tokens"] == 100
        # Two or more tokens of a new answer must agree with one before drafts are right.
        assert 30 <= meta["spec_verify_ct"] <= 45
        # Prefixes hold nothing that was decoded.
        assert meta["cached_tokens"] == (len(prompt) - 1) // 16 * 16


def test_each_request_keeps_its_own_rule(engine, plain):
    generate(engine, **MIXED)
    found = generate(engine, **MIXED)
    assert_same(found, plain["mixed"])
    assert sum(meta["spec_verify_ct"] for _, _, meta in found) < 8 * 45


def test_a_switch_of_the_schedule(engine, plain):
    set_schedule(engine, "fixed-96")
    found = generate(engine, ALONE[3:], 60)
    set_schedule(engine, "test")
    assert_same(found, plain["switched"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.3},
    ],
    ids=str,
)
def test_sampled_tokens_have_the_distribution_of_sparse_decode(engine, oracle, sampling):
    """The place of each token in its distribution, which the oracle computes, is uniform.

    A token that a draft made too likely would lie in the wrong place; the fewer tokens a
    distribution has, the more drafts are right.
    """
    torch.manual_seed(0)
    prompt = random_prompt(60, 100)
    bias = {str(token): 8.0 for token in PATTERN}
    answers = generate(engine, [prompt] * 48, 48, **sampling, logit_bias=bias)
    places, accepted, off = [], 0, 0
    for ids, log_probs, meta in answers:
        logits = oracle.log_probs(prompt, ids).clone()
        logits[:, PATTERN] += 8
        probs = (logits / sampling["temperature"]).softmax(-1)
        expected = probs.log().gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        if not torch.allclose(log_probs.double(), expected, atol=2 * FP32, rtol=0):
            # In fp32 pages whose scores agree in six digits may come in another order.
            off += 1
            continue
        ordered, order = probs.sort(-1, descending=True)
        if "top_p" in sampling:
            ordered[:, sampling["top_k"] :] = 0
            ordered[ordered.cumsum(-1) - ordered > sampling["top_p"]] = 0
        ordered[ordered < sampling.get("min_p", 0.0) * ordered[:, :1]] = 0
        ordered /= ordered.sum(-1, keepdim=True)
        at = (order == torch.tensor(ids)[:, None]).int().argmax(-1, keepdim=True)
        share = ordered.gather(-1, at)
        assert (share > 0).all()
        before = ordered.cumsum(-1).gather(-1, at) - share
        places.append((before + torch.rand_like(before) * share).flatten())
        accepted += meta["completion_tokens"] - meta["spec_verify_ct"] - 1
    assert accepted > 100 and off <= (sampling == {"temperature": 1.0})
    counts = (torch.cat(places) * 20).long().clamp_max(19).bincount(minlength=20)
    assert chisquare(counts.numpy()).pvalue > 1e-3


def test_retractions_and_aborts(sharp_llama, schedule_file, adapter, oracle):
    """Six answers do not fit into the KV pool, and some requests end on the way."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    small = arguments(schedule_file, adapter, DRAFTS) | {
        "max_total_tokens": 1024,
        "max_running_requests": 6,
        "schedule_conservativeness": 0.1,
    }
    draw = random.Random(0)
    prompts = [random_prompt(70 + number % 3, 90) for number in range(12)]

    async def one(manager, number: int) -> dict:
        request = GenerateReqInput(
            rid=f"request-{number}",
            input_ids=prompts[number],
            sampling_params={"max_new_tokens": 150, "temperature": draw.choice([0, 0, 1.0])},
            return_logprob=True,
            stream=True,
        )
        answers = []
        async for answer in manager.generate_request(request, None):
            answers.append(answer["meta_info"])
            if number % 4 == 3 and len(answers) == 10:
                manager.abort_request(f"request-{number}")
        return answers[-1]

    async def all_of(manager) -> list:
        return await asyncio.gather(*(one(manager, number) for number in range(len(prompts))))

    with start_engine(sharp_llama, **small) as engine:
        answers = engine.loop.run_until_complete(all_of(engine.tokenizer_manager))
        connect(engine).call_sparrow("landmarks")
        after = generate(engine, prompts[:1], 100)
    assert sum(meta.get("num_retractions", 0) for meta in answers) > 0
    assert {meta["finish_reason"]["type"] for meta in answers} == {"length", "abort"}
    ids, log_probs, _ = after[0]
    expected = oracle.log_probs(prompts[0], ids).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs.double(), expected, atol=FP32, rtol=0)


def test_what_is_refused(engine):
    prompt = random_prompt(80, 20)
    for name, value in [("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("regex", "a+")]:
        with pytest.raises(ValueError, match=f"{name}=.*not served with --sparrow-draft-tokens"):
            generate(engine, [prompt], 5, **{name: value})
    assert len(generate(engine, [prompt], 5)[0][0]) == 5
