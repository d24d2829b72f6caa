"""Switching the schedule of a running engine and of a running server."""

import asyncio

import pytest
import torch
from engines import last_of, random_prompt, sparse, start_engine, start_request
from oracle import FP32, ContractModel

from sparrow_sglang import push_adapter
from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import EndpointError
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.sglang_compat.versions import request_of

PROMPT = random_prompt(0, 150)
SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
MINE = BudgetSchedule(
    name="mine", page_size=16, bin_tokens=32, budget_tokens=(64, 96, 112), tail_target=0.9
)


def answer(engine, option: dict | None = None) -> dict:
    params = SAMPLING if option is None else SAMPLING | {"custom_params": {"sparrow": option}}
    return engine.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True)


@pytest.fixture(scope="module")
def assert_decoded_by(sharp_llama):
    """A function that asserts that an answer follows the schedule of a name, and no other one."""
    schedules = (BudgetSchedule.fixed(64), BudgetSchedule.fixed(128), MINE)
    oracles = {schedule.name: ContractModel(sharp_llama, schedule) for schedule in schedules}

    def check(answer: dict, name: str) -> None:
        errors = {other: float(o.errors(PROMPT, answer).max()) for other, o in oracles.items()}
        assert [other for other, error in errors.items() if error < FP32] == [name], errors

    return check


@pytest.fixture(scope="module")
def shared_engine(sharp_llama):
    with start_engine(sharp_llama, **sparse("fixed-64")) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """The engine as it was started, whatever the test before left active."""
    set_schedule(shared_engine, "fixed-64")
    return shared_engine


def test_switching_by_name_value_and_path(engine, assert_decoded_by, tmp_path):
    assert get_schedule(engine) == BudgetSchedule.fixed(64)
    assert_decoded_by(answer(engine), "fixed-64")
    assert set_schedule(engine, "fixed-128") == BudgetSchedule.fixed(64)
    again = answer(engine)
    # The prompt's KV and landmarks are those that fixed-128 would have made, too.
    assert again["meta_info"]["cached_tokens"] == (len(PROMPT) - 1) // 16 * 16
    assert_decoded_by(again, "fixed-128")
    assert set_schedule(engine, MINE) == BudgetSchedule.fixed(128)
    assert get_schedule(engine) == MINE
    assert_decoded_by(answer(engine), "mine")
    MINE.save(tmp_path / "mine.json")
    set_schedule(engine, "fixed-64")
    set_schedule(engine, str(tmp_path / "mine.json"))
    assert_decoded_by(answer(engine), "mine")


def test_pipeline_stages_switch_between_the_same_two_requests(
    sharp_llama, assert_decoded_by, capfd
):
    """The stages hear of a switch one after the other, and later requests follow it in order."""
    with start_engine(sharp_llama, **sparse("fixed-64"), pp_size=2) as engine:
        assert_decoded_by(answer(engine), "fixed-64")

        async def switch_under_load() -> None:
            manager = engine.tokenizer_manager
            for name in ("fixed-128", "fixed-64"):
                # The switch waits for `before`, and holds back `after`.
                before = asyncio.ensure_future(generate_some(engine, 2))
                await asyncio.sleep(0.05)
                switched = asyncio.ensure_future(manager.sparrow.calls["schedule"](name))
                await asyncio.sleep(0.01)
                after = asyncio.ensure_future(generate_some(engine, 2))
                old = (await switched)["previous"]["name"]
                for outputs, schedule in ((await before, old), (await after, name)):
                    for output in outputs:
                        assert_decoded_by(output, schedule)

        engine.loop.run_until_complete(switch_under_load())
    logged = capfd.readouterr().err
    assert "schedule fixed-64 is replaced: schedule fixed-128 (" in logged
    assert "a switch of the schedule waits for 2 requests (" in logged


async def generate_some(engine, count: int) -> list[dict]:
    requests = [
        engine.async_generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True)
        for _ in range(count)
    ]
    return await asyncio.gather(*requests)


def test_a_caller_that_keeps_an_iterator_of_answers_delays_no_switch(engine):
    answers = engine.tokenizer_manager.generate_request(
        request_of({"input_ids": PROMPT, "sampling_params": SAMPLING}), None
    )
    engine.loop.run_until_complete(anext(answers))
    assert set_schedule(engine, "fixed-128", timeout_s=20).name == "fixed-64"
    engine.loop.run_until_complete(answers.aclose())


def test_dense_decode_and_back(engine, assert_decoded_by, sharp_llama):
    """A budget of one request still holds while the server's schedule is dense."""
    set_schedule(engine, "dense")
    assert get_schedule(engine).is_dense
    dense = answer(engine, {"report": True})
    assert ContractModel(sharp_llama).errors(PROMPT, dense).max() < FP32
    report = dense["meta_info"]["sparrow"]
    assert report["schedule"] == "dense" and report["kv_budget_last"] is None
    assert report["kv_tokens_read_last"] == report["kv_tokens_cached_last"] == 173
    assert_decoded_by(answer(engine, {"kv_budget_tokens": 64}), "fixed-64")
    assert set_schedule(engine, "fixed-64").name == "dense"
    assert_decoded_by(answer(engine), "fixed-64")


def test_a_schedule_of_another_model_is_reported_to_the_caller(engine):
    with pytest.warns(UserWarning, match="qwen3-4b-0.80"):
        set_schedule(engine, "qwen3-4b-0.80")
    assert get_schedule(engine).name == "qwen3-4b-0.80"


def test_an_engine_without_lora_says_so(engine):
    with pytest.raises(EndpointError, match="--enable-lora"):
        push_adapter(engine, "mine", {"x": torch.zeros(1)}, {"r": 1})


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_while_paused(engine, assert_decoded_by, mode):
    """A switch is refused while requests are paused, and works when the pause has aborted them."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager = engine.tokenizer_manager
    sampling = SAMPLING | {"max_new_tokens": 200}

    async def switch_in_the_middle() -> dict:
        answers = await start_request(engine, input_ids=PROMPT, sampling_params=sampling)
        # Keep reading: a pause that aborts waits until its requests have been answered.
        running = asyncio.ensure_future(last_of(answers))
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        if mode == "in_place":
            with pytest.raises(ValueError, match="paused"):
                await manager.sparrow.calls["schedule"](schedule="fixed-128")
        else:
            await manager.sparrow.calls["schedule"](schedule="fixed-128")
        await manager.continue_generation(ContinueGenerationReqInput())
        return await running

    output = engine.loop.run_until_complete(switch_in_the_middle())
    reason = output["meta_info"]["finish_reason"]["type"]
    expected = ("length", "fixed-64") if mode == "in_place" else ("abort", "fixed-128")
    assert (reason, get_schedule(engine).name) == expected
    assert_decoded_by(answer(engine), expected[1])
