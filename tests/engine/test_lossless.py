"""Lossless decoding: what stock SGLang would have returned, token by token or by distribution."""

import asyncio
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engines import (
    SCHEDULE,
    flush,
    last_of,
    random_prompt,
    require_whole_pool,
    save_tiny_model,
    sparse,
    start_engine,
    start_request,
    weight_updates,
)
from oracle import FP32, ContractModel, logprobs_of
from rounds import VARIED, accepted_of, require_varied
from safetensors.torch import load_file
from sampled_answers import SETTINGS, SampledAnswers
from sglang.srt.runtime_context import get_parallel

from sparrow_sglang import push_adapter, set_schedule
from sparrow_sglang.attention_backends.backend import SparrowAttnBackend, sparrow_backend
from sparrow_sglang.client.endpoint import EndpointError, connect
from sparrow_sglang.planning.rounds import DENSE, Plan
from sparrow_sglang.plugin.arguments.server_args import resolve_schedule
from sparrow_sglang.plugin.lossless import algorithm
from sparrow_sglang.plugin.lossless.choice import RoundChoice
from sparrow_sglang.plugin.lossless.draft_weights import DraftWeights
from sparrow_sglang.plugin.lossless.hooks import finish_by_token
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.lossless.passes import Passes, VerifyGraphs
from sparrow_sglang.plugin.lossless.worker import LosslessWorker
from sparrow_sglang.plugin.scheduler import forward, timing
from sparrow_sglang.sglang_compat.arguments import read_model_config, resolve, resolved

RUN = forward.run
EXPERTS = mock.Mock()
DRAFTS = {
    "speculative_algorithm": "SPARROW",
    "speculative_num_draft_tokens": 5,
    "sparrow_draft_weights": "fp8",
}
# Two narrow rounds write no more than a wide one, and go on without SGLang's loop.
IN_PAIRS = DRAFTS | {"speculative_num_draft_tokens": 8}
POOL = {
    "chunked_prefill_size": 64,
    "page_size": 16,
    # Requests are admitted whatever they may generate, and do not all fit.
    "max_total_tokens": 1024,
    "schedule_conservativeness": 0.01,
    "context_length": 512,
}


def measure(worker: Any) -> None:
    """As on a GPU, with a clock that stands still."""
    with (
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "Event", lambda **_: mock.Mock(elapsed_time=lambda _: 1.0)),
    ):
        for plan in (DENSE, Plan(0, 3, 4), Plan(4, 0, 8)):
            worker._seconds(2, 128, plan)
        assert worker._seconds(2, 128, DENSE, timing.least_launch_seconds) > 0
        worker._histories.clear()
    worker.measured = sparrow_backend(worker.model_runner).schedule


def require_measured(scheduler: Any) -> None:
    """Runs in the scheduler."""
    worker = scheduler.model_worker
    assert worker.measured == sparrow_backend(worker.model_runner).schedule


def run_within_context(runner: Any, *arguments: Any) -> Any:
    """Some models have no rotary angles past the context."""
    *_, positions, _ = arguments
    assert int(positions.max()) < runner.model_config.context_len
    result = RUN(runner, *arguments)
    if len(positions) > 4 * len(arguments[0]):
        # A model with experts has it, on a GPU only.
        result.routed_experts_output = EXPERTS
    return result


def require_experts(scheduler: Any) -> None:
    """Runs in the scheduler."""
    EXPERTS.finalize.assert_called()


@pytest.fixture(scope="module")
def lossless(sharp_llama: str) -> Iterator[Any]:
    from sglang.srt.managers.scheduler import Scheduler

    with pytest.MonkeyPatch.context() as patch:
        # The schedulers are forked from this process.
        patch.setattr(Scheduler, "require_whole_pool", require_whole_pool, raising=False)
        patch.setattr(Scheduler, "require_measured", require_measured, raising=False)
        patch.setattr(Scheduler, "require_experts", require_experts, raising=False)
        patch.setattr(LosslessWorker, "measure", measure)
        patch.setattr(forward, "run", run_within_context)
        with start_engine(sharp_llama, **sparse(SCHEDULE), **IN_PAIRS, **POOL) as engine:
            yield engine


@pytest.fixture(scope="module")
def stock(lossless: Any, sharp_llama: str) -> Iterator[Any]:
    """Started last: this process keeps the speculative settings of the latest engine."""
    with start_engine(sharp_llama, attention_backend="torch_native", **POOL) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every token of the pool must be free again after each test."""
    yield
    if "lossless" in request.fixturenames:
        engine = request.getfixturevalue("lossless")
        flush(engine)
        engine.collective_rpc("require_whole_pool")


def greedy(new_tokens: int, **fields: Any) -> dict[str, Any]:
    # No token ends an answer of these models; with ignore_eos none would be retracted.
    return {"temperature": 0, "max_new_tokens": new_tokens} | fields


def tokens_of(answers: Any) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def require_equal(got: Any, expected: Any, with_logprobs: bool = True) -> None:
    assert tokens_of(got) == tokens_of(expected)
    if with_logprobs:
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=FP32)


SEVERAL = {
    "input_ids": [random_prompt(seed, length) for seed, length in enumerate((200, 90, 60, 7))],
    "sampling_params": greedy(70),
    "return_logprob": True,
}


def test_greedy_answers_and_logprobs_are_those_of_stock_sglang(lossless: Any, stock: Any) -> None:
    """Prompts in chunks and whole, with drafts that are sparse at once or later; without lists of
    log-probs narrow rounds run in pairs."""
    lists = {"top_logprobs_num": 3, "token_ids_logprob": [[5, 17]] * 4}
    got, expected = (engine.generate(**SEVERAL, **lists) for engine in (lossless, stock))
    require_equal(got, expected)
    require_equal(lossless.generate(**SEVERAL), expected)
    for one, other in zip(got, expected, strict=True):
        a, b = one["meta_info"], other["meta_info"]
        for key in ("top", "token_ids"):
            ours, stocks = (x[f"output_{key}_logprobs"] for x in (a, b))
            assert [[t for _, t, _ in row] for row in ours] == [
                [t for _, t, _ in row] for row in stocks
            ]
            np.testing.assert_allclose(
                [[p for p, *_ in row] for row in ours],
                [[p for p, *_ in row] for row in stocks],
                atol=FP32,
            )


@pytest.mark.parametrize("further", [{}, {"top_logprobs_num": 2, "token_ids_logprob": [5, 17]}])
def test_a_prompt_alone_has_no_log_prob_of_an_output(
    lossless: Any, stock: Any, further: dict[str, Any]
) -> None:
    fields = {"input_ids": random_prompt(3, 60), "return_logprob": True, "logprob_start_len": 0}
    fields |= {"sampling_params": greedy(0)} | further
    ours, stocks = (engine.generate(**fields) for engine in (lossless, stock))
    assert ours["output_ids"] == stocks["output_ids"] == []
    for key in (key for key in stocks["meta_info"] if key.endswith("logprobs")):
        a, b = ours["meta_info"][key], stocks["meta_info"][key]
        assert (key, len(a)) == (key, len(b))
    assert ours["meta_info"]["output_token_logprobs"] == []


def test_an_answer_ends_with_the_context(lossless: Any, stock: Any) -> None:
    """The last rounds go past its end. An empty bias is none."""
    fields = {"input_ids": random_prompt(15, 470), "sampling_params": greedy(41, logit_bias={})}
    got, expected = (engine.generate(**fields) for engine in (lossless, stock))
    assert got["output_ids"] == expected["output_ids"]
    lossless.collective_rpc("require_experts")


def test_retracted_requests_are_answered_as_in_stock_sglang(lossless: Any, stock: Any) -> None:
    fields = {
        "input_ids": [random_prompt(20 + seed, 60) for seed in range(8)],
        "sampling_params": greedy(180),
    }
    got, expected = (engine.generate(**fields) for engine in (lossless, stock))
    assert any(answer["meta_info"]["num_retractions"] for answer in got)
    assert tokens_of(got) == tokens_of(expected)


def test_prefixes_of_answers_are_shared(lossless: Any, stock: Any) -> None:
    """A second turn reads KV that was verified, in place of prefilled KV."""
    prompt = random_prompt(30, 100)
    answer = lossless.generate(input_ids=prompt, sampling_params=greedy(80))["output_ids"]
    turn = prompt + answer + random_prompt(31, 20)
    fields = {"input_ids": turn, "sampling_params": greedy(40)}
    got, expected = (engine.generate(**fields) for engine in (lossless, stock))
    assert got["meta_info"]["cached_tokens"] >= 160
    assert got["output_ids"] == expected["output_ids"]
    # Landmarks of every page in the tree are those of its keys.
    connect(lossless).call_sparrow("landmarks")


def test_others_go_on_where_one_is_aborted(lossless: Any, stock: Any) -> None:
    prompt = random_prompt(40, 100)

    async def beside_an_aborted_one() -> list[int]:
        aborted = await start_request(
            lossless, rid="gone", input_ids=prompt[:90], sampling_params=greedy(400)
        )
        other = await start_request(lossless, input_ids=prompt, sampling_params=greedy(80))
        rest = asyncio.ensure_future(last_of(other))
        lossless.tokenizer_manager.abort_request("gone")
        await last_of(aborted)
        return (await rest)["output_ids"]

    expected = stock.generate(input_ids=prompt, sampling_params=greedy(80))["output_ids"]
    assert lossless.loop.run_until_complete(beside_an_aborted_one()) == expected


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_answer_goes_on_after_a_pause(lossless: Any, stock: Any, mode: str) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    fields = {"input_ids": random_prompt(45, 120), "sampling_params": greedy(200)}

    async def paused() -> list[int]:
        manager = lossless.tokenizer_manager
        answers = await start_request(lossless, **fields)
        rest = asyncio.ensure_future(last_of(answers))
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        assert not rest.done()
        await manager.continue_generation(ContinueGenerationReqInput())
        return (await rest)["output_ids"]

    expected = stock.generate(**fields)["output_ids"]
    assert lossless.loop.run_until_complete(paused()) == expected


def test_drafts_follow_another_schedule(
    lossless: Any, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds are timed anew, which leaves the prefix cache as it is."""
    monkeypatch.setattr(lossless.tokenizer_manager.sparrow, "measures_dense", True)
    fields = {"input_ids": random_prompt(48, 200), "sampling_params": greedy(50)}
    expected = stock.generate(**fields)["output_ids"]
    # Every row of the token table holds the cached prompt.
    lossless.generate(**fields | {"sampling_params": greedy(9, n=8)})
    before = set_schedule(lossless, "fixed-128")
    lossless.collective_rpc("require_measured")
    connect(lossless).call_sparrow("landmarks")
    answer = lossless.generate(**fields)
    assert answer["output_ids"] == expected and answer["meta_info"]["cached_tokens"] >= 192
    set_schedule(lossless, before)


def load_from_disk(engine: Any, model: str) -> None:
    assert engine.update_weights_from_disk(model)[0]


def load_from_tensors(engine: Any, model: str) -> None:
    with weight_updates(engine):
        tensors = load_file(Path(model) / "model.safetensors")
        assert engine.update_weights_from_tensor(list(tensors.items()))[0]


def test_arguments_are_resolved_before_plugins_are_loaded(
    lossless: Any, sharp_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by verl, which launches the processes of an engine itself."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative import spec_registry

    monkeypatch.delitem(spec_registry._REGISTRY, "SPARROW")
    args = ServerArgs(model_path=sharp_llama, attention_backend="sparrow", **DRAFTS)
    resolve(args)
    assert resolved(args).speculative_num_steps == 4


@pytest.mark.parametrize("released", [True, False])
def test_new_weights_draft_and_verify(
    lossless: Any, stock: Any, sharp_llama: str, tmp_path: Path, released: bool
) -> None:
    """As by a trainer on the same GPU, and by one that knows SGLang up to 0.5.20: no sessions."""
    other = save_tiny_model(tmp_path, seed=1, spread=0.15)
    fields = {"input_ids": random_prompt(50, 120), "sampling_params": greedy(50)}
    before = lossless.generate(**fields)["output_ids"]
    # Up to 0.5.20 SGLang's own scheduler ends if its last step is still in flight.
    flush(stock)
    load_from_disk(stock, other)
    expected = stock.generate(**fields)["output_ids"]
    flush(stock)
    load_from_disk(stock, sharp_llama)
    if released:
        lossless.release_memory_occupation()
        with pytest.raises(ValueError, match="released"):
            lossless.generate(**fields)
        lossless.resume_memory_occupation(["weights"])
        load_from_tensors(lossless, other)
        lossless.resume_memory_occupation(["kv_cache", "cuda_graph"])
    else:
        tensors = list(load_file(Path(other) / "model.safetensors").items())
        for part in (tensors[::2], tensors[1::2]):
            assert lossless.update_weights_from_tensor(part)[0]
    answer = lossless.generate(**fields)["output_ids"]
    load_from_disk(lossless, sharp_llama)
    assert answer == expected != before
    assert lossless.generate(**fields)["output_ids"] == before


def test_adapters_are_to_be_merged(lossless: Any, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="merge"):
        push_adapter(lossless, "adapter", {"lora_A": torch.zeros(1, 1)}, {"r": 1})


def test_defaults(make_args: Any) -> None:
    algorithm.register()
    args = make_args(sparrow_schedule=None, speculative_algorithm="sparrow")
    view = resolved(args)
    assert view.speculative_num_draft_tokens == 9
    assert view.max_running_requests == 128
    schedule = resolve_schedule(args, read_model_config(args).hf_config)
    assert schedule.name == "drafts"
    with pytest.raises(ValueError, match="speculative_num_steps"):
        make_args(speculative_algorithm="SPARROW", speculative_num_steps=3)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("gpt_oss", "windows"), ("qwen3_next", "linear attention"), ("qwen3_5", "images")],
)
def test_models_that_it_does_not_serve_are_rejected(
    tmp_path: Path, kind: str, problem: str
) -> None:
    """Not by `make_args`: without an accelerator, some are rejected for other reasons."""
    from sglang.srt.server_args import ServerArgs

    model = save_tiny_model(tmp_path, kind)
    args = ServerArgs(model_path=model, attention_backend="sparrow", **DRAFTS)
    problems = mode_of(args).model_problems(read_model_config(args))
    assert any(problem in line for line in problems)


def test_the_number_of_drafts_changes_no_greedy_answer(
    lossless: Any, stock: Any, sharp_llama: str
) -> None:
    """The last test with `stock`, whose settings in this process other engines replace."""
    expected = stock.generate(**SEVERAL)
    arguments = DRAFTS | sparse(SCHEDULE)
    for weights in ("model", "fp8"):
        arguments["sparrow_draft_weights"] = weights
        with start_engine(sharp_llama, rounds=VARIED, **arguments, **POOL) as engine:
            # Drafts that read all KV with the model's weights are accepted: two turns.
            whole = engine.generate(input_ids=random_prompt(3, 7), sampling_params=greedy(29))
            if weights == "model":
                assert accepted_of(whole) == [6, 2, 0, 2, 2]
            for with_logprobs in (False, True):
                got = engine.generate(**SEVERAL | {"return_logprob": with_logprobs})
                require_equal(got, expected, with_logprobs)
                for answer in got:
                    require_varied(answer)
            connect(engine).call_sparrow("landmarks")


def test_what_was_written_before_is_drafted(sharp_llama: str) -> None:
    """By rounds without a sparse step: what the answers to the same prompt have, which ended or run
    beside it, and none to others."""
    prompt = random_prompt(90, 100)
    arguments = IN_PAIRS | sparse(SCHEDULE)
    with start_engine(sharp_llama, rounds=[(0, 3, 4)], **arguments, **POOL) as engine:

        def answers(*prompts: list[int]) -> tuple[list[list[int]], float]:
            got = engine.generate(input_ids=[*prompts], sampling_params=greedy(64))
            for answer in got:
                meta, counts = answer["meta_info"], accepted_of(answer)
                assert len(counts) <= 4 and sum(counts) == meta["spec_verify_ct"]
                accepted = sum(n * count for n, count in enumerate(counts))
                assert accepted == meta["spec_num_correct_drafts"]
            return tokens_of(got), min(a["meta_info"]["spec_accept_length"] for a in got)

        # One token apart, so that the same text is likely, and must not be seen.
        answers([*prompt, 5])
        [first], alone = answers(prompt)
        [second], after = answers(prompt)
        together, beside = answers(prompt, prompt, prompt)
    assert alone < 3 < 3.7 < min(after, beside) <= 4
    assert [first] * 4 == [second, *together]


def test_copies_of_weights_follow_updates(sharp_llama: str, tmp_path: Path) -> None:
    """Copies of the old weights would draft what the new ones reject."""
    other = save_tiny_model(tmp_path, seed=1, spread=0.15)
    # Drafts read the whole KV.
    with start_engine(sharp_llama, **sparse("fixed-512"), page_size=16, **DRAFTS) as engine:
        for load in (load_from_tensors, load_from_disk):
            load(engine, other if load is load_from_tensors else sharp_llama)
            fields = {"input_ids": random_prompt(50, 120), "sampling_params": greedy(50)}
            assert engine.generate(**fields)["meta_info"]["spec_accept_length"] > 2


def run_and_draw(*arguments: Any) -> Any:
    """Leaves the random numbers of each rank at another place."""
    torch.rand(get_parallel().tp_rank)
    return RUN(*arguments)


def test_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of tokens that ranks sampled apart are no model's; greedy answers are those of one
    rank."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}
    model, other = (
        save_tiny_model(tmp_path / str(seed), seed=seed, spread=0.15, **shape) for seed in (0, 1)
    )
    fields = {"input_ids": random_prompt(70, 120)}

    def answers(engine: Any) -> list[Any]:
        first = engine.generate(**fields, sampling_params=greedy(40))
        load_from_tensors(engine, other)
        return [first, engine.generate(**fields, sampling_params=greedy(40))]

    with start_engine(model, attention_backend="torch_native", **POOL) as dense:
        expected = tokens_of(answers(dense))
    monkeypatch.setattr(forward, "run", run_and_draw)
    with start_engine(model, **sparse(SCHEDULE), tp_size=2, **IN_PAIRS, **POOL) as engine:
        warm = {"temperature": 1.0, "max_new_tokens": 40}
        sampled = engine.generate(**fields, sampling_params=warm, return_logprob=True)
        got = answers(engine)
    assert ContractModel(model).errors(fields["input_ids"], sampled).max() < FP32
    assert tokens_of(got) == expected
    # Some drafts were accepted, and some rejected.
    assert all(1 < answer["meta_info"]["spec_accept_length"] < 8 for answer in [sampled, *got])


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> SampledAnswers:
    return SampledAnswers(tmp_path_factory.mktemp("sampled"))


def test_sampled_answers_have_the_dense_distribution(sampled: SampledAnswers) -> None:
    values = sampled.p_values(SETTINGS, **IN_PAIRS)
    assert min(values) > 1e-4, values


def test_the_control_of_sparse_decode_has_another(sampled: SampledAnswers) -> None:
    assert sampled.p_values(SETTINGS[:1])[0] < 1e-12


@pytest.mark.parametrize(
    ("tokens", "returned", "reason"),
    [([5, 7, 9], 3, "stop"), ([5, 8, 9, 9], 4, "length"), ([5, 8], None, "abort")],
)
def test_an_abort_hides_no_end_within_its_round(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], returned: int | None, reason: str
) -> None:
    """A trainer continues aborted responses. One token precedes those of the round."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(max_new_tokens=4, stop_token_ids={7})
    parameters.normalize(None)
    req = Req.__new__(Req)
    fields = {"tokenizer": None, "eos_token_ids": None, "grammar": None, "vocab_size": 256}
    vars(req).update(fields, sampling_params=parameters, output_ids=[1, *tokens])
    req.finished_reason = req.finished_len = None
    req.reasoning_tokens = len(req.output_ids)
    req.to_finish = FINISH_ABORT()
    finish_by_token(inspect.unwrap(Req.update_finish_state), req, len(tokens))
    assert req.finished_len == returned and req.output_ids == [1, *tokens]
    assert req.reasoning_tokens == (returned or len(req.output_ids))
    assert req.finished_reason.to_json()["type"] == reason


# What only graphs and streams on a GPU would show.
def test_graphs_of_verifications_refuse_drafts() -> None:
    """A draft has no spec_info, by which SGLang compares widths."""
    runner = VerifyGraphs.__new__(VerifyGraphs)
    for verifies in (True, False):
        mode = SimpleNamespace(is_target_verify=lambda verifies=verifies: verifies)
        with mock.patch.object(VerifyGraphs.__base__, "can_run_graph", return_value=True):
            assert runner.can_run_graph(SimpleNamespace(forward_mode=mode)) is verifies


def test_the_dense_side_allocates_for_verifications_only() -> None:
    backend = SparrowAttnBackend.__new__(SparrowAttnBackend)
    backend.dense, backend.sparse, narrow = mock.Mock(), mock.Mock(), mock.Mock()
    backend._narrow = {4: (narrow, mock.Mock())}
    for tokens in (40, 32, 8):
        backend.init_cuda_graph_state(8, tokens)
    backend.dense.init_cuda_graph_state.assert_called_once_with(8, 40)
    narrow.init_cuda_graph_state.assert_called_once_with(8, 32)


def test_two_rounds_in_sequence_are_counted_by_hand() -> None:
    """Of three requests, one of which has ended before."""
    from sglang.srt.managers.schedule_batch import Req

    class Request(SimpleNamespace):
        update_spec_correct_drafts_histogram = Req.update_spec_correct_drafts_histogram

    new = {"spec_verify_ct": 0, "spec_num_cap_tokens": 0, "spec_num_correct_drafts": 0}
    reqs = [
        Request(**new, spec_correct_drafts_histogram=[], is_retracted=False, finished=ended)
        for ended in (lambda: False, lambda: True, lambda: False)
    ]
    worker: Any = object.__new__(LosslessWorker)
    worker._choice, worker._metrics = RoundChoice(8, looks_up=True), mock.Mock()
    worker._in_flight = deque([(Plan(1, 2, 4), reqs, torch.tensor([3, 1, 0]))])
    left = [5, 1, 1]
    worker.on_verify_complete_cpu(left, batch_size=3)
    assert left == [2, 0, 1]
    for req, first in ((reqs[0], 3), (reqs[2], 0)):
        assert (req.spec_verify_ct, req.spec_num_cap_tokens) == (1, 2 * 3)
        assert req.spec_num_correct_drafts == first
        assert req.spec_correct_drafts_histogram == [0] * first + [1]
    assert not reqs[1].spec_verify_ct and not reqs[1].spec_correct_drafts_histogram
    calls = [call.args for call in worker._metrics.observe.call_args_list]
    assert calls == [
        (3, {"sparse": (3, 2, 1), "lookup": (6, 2, 2)}),
        (3, {"sparse": (3, 2, 2), "lookup": (6, 3, 1)}),
    ]


@pytest.mark.parametrize(
    ("changed", "pairs"),
    [
        ({}, True),
        ({"return_logprob": True}, True),
        ({"return_logprob": True, "top": [0, 2]}, False),
        ({"return_logprob": True, "ids": [None, [7]]}, False),
        ({"waits": True}, False),
        ({"experts": True}, False),
    ],
)
def test_rounds_are_chosen_as_they_run(changed: dict[str, Any], pairs: bool) -> None:
    """Narrow ones in pairs, unless lists of each pass are returned or the host has to wait."""
    worker: Any = object.__new__(LosslessWorker)
    worker._returns_experts = changed.get("experts", False)
    batch: Any = SimpleNamespace(
        return_logprob=changed.get("return_logprob", False),
        top_logprobs_nums=changed.get("top", [0, 0]),
        token_ids_logprobs=changed.get("ids", [None, None]),
        seq_lens_cpu=torch.ones(1) if changed.get("waits") else None,
        req_pool_indices=SimpleNamespace(is_cuda=True),
    )
    assert worker._runs_in_pairs(batch) == pairs


def test_one_round_follows_a_prefill() -> None:
    """First tokens are returned after it is launched."""
    worker: Any = object.__new__(LosslessWorker)
    vars(worker).update(_prefilled=False, _histories=None, _passes=mock.Mock(), _choice=mock.Mock())
    worker._target_worker = mock.Mock()
    worker._choice.next_round.side_effect = NotImplementedError
    for prefill in (True, False, False):
        batch: Any = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda prefill=prefill: prefill),
            reqs=[SimpleNamespace(origin_input_ids=[1], output_ids=[2])],
            seq_lens=torch.tensor([1]),
        )
        with (
            nullcontext() if prefill else pytest.raises(NotImplementedError),
            mock.patch.object(worker, "_runs_in_pairs", return_value=True),
        ):
            worker.forward_batch_generation(batch)
    assert [call.args[-1] for call in worker._choice.next_round.call_args_list] == [False, True]


def test_no_event_of_a_draft_is_left_to_the_scheduler() -> None:
    runner = SimpleNamespace(decode_cuda_graph_runner="verify", attn_backend=SimpleNamespace())
    passes = Passes.__new__(Passes)
    passes.runner, passes.weights = runner, DraftWeights(torch.nn.Module())
    passes._step_graphs, passes._verify_graphs = "steps", {4: "narrow"}
    with passes.steps(dense=False):
        assert runner.decode_cuda_graph_runner == "steps"
        runner.shared_read_done_event = "of a draft"
    assert runner.shared_read_done_event is None
    with passes.verification(4):
        assert runner.decode_cuda_graph_runner == "narrow"
    assert runner.decode_cuda_graph_runner == "verify"
