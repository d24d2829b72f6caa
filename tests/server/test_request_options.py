"""What a request may ask for, by itself and mixed with others on one running engine."""

import pytest
import torch
from engines import flush, start_engine

from sparrow_sglang.schedule import BudgetSchedule

PAGE = 16
FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64


A = BudgetSchedule(
    name="a", page_size=PAGE, bin_tokens=64, budget_tokens=tuple(PAGE * n for n in (4, 5, 5, 7))
)
OPTIONS = [None, {"dense": True}, {"kv_budget_tokens": 80}, {"dense": False}]


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (count,), generator=generator).tolist()


def sampling(option, new_tokens: int) -> dict:
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return params if option is None else params | {"custom_params": {"sparrow": option}}


@pytest.fixture(scope="module")
def engine(sharp_llama, tmp_path_factory):
    A.save(path := tmp_path_factory.mktemp("schedules") / "a.json")
    with start_engine(
        sharp_llama,
        attention_backend="sparrow",
        sparrow_schedule=str(path),
        chunked_prefill_size=64,
    ) as engine:
        yield engine


def generate(engine, prompts, options, lengths) -> list[tuple[list[int], torch.Tensor]]:
    outputs = engine.generate(
        input_ids=prompts,
        sampling_params=[sampling(o, n) for o, n in zip(options, lengths, strict=True)],
        return_logprob=True,
    )
    values = [output["meta_info"]["output_token_logprobs"] for output in outputs]
    return [([t for _, t, _ in rows], torch.tensor([v for v, *_ in rows])) for rows in values]


def test_a_row_of_the_token_table_forgets_its_last_request(engine):
    """Rows are given to one request after the other; the last one here has no option."""
    prompt = tokens(7, 170)
    plain = [generate(engine, [prompt], [None], [24])[0] for _ in range(2)]
    for option in OPTIONS[1:3]:
        generate(engine, [prompt] * 8, [option] * 8, [4] * 8)
        [(ids, got)] = generate(engine, [prompt], [None], [24])
        assert ids == plain[0][0]
        torch.testing.assert_close(got, plain[0][1], atol=FP32, rtol=0)


def test_sparse_kv_stays_private_under_every_option(engine):
    """40 + 30 tokens are sparse under a cap of 48 and dense under A, which is sparse from 81 on.

    In a dense row 40 + 90 tokens are dense.
    """
    prompt = tokens(5, 40)
    cached = {}
    for option, new_tokens in [({"kv_budget_tokens": 48}, 30), (None, 30), ({"dense": True}, 90)]:
        flush(engine)
        [(ids, _)] = generate(engine, [prompt], [option], [new_tokens])
        again = engine.generate(
            input_ids=prompt + ids + tokens(6, 20), sampling_params={"max_new_tokens": 1}
        )
        cached[str(option)] = again["meta_info"]["cached_tokens"]
    # The KV of the last token is never written, so 69 and 129 tokens have KV; whole pages count.
    assert list(cached.values()) == [32, 64, 128]
