"""Switching the schedule of a running engine and of a running server."""

import asyncio

import httpx
import pytest
import torch
from engines import last_of, start_engine, start_request
from servers import start_server

from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import EndpointError
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

PROMPT = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(0)).tolist()
SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
MINE = BudgetSchedule(
    name="mine", page_size=16, bin_tokens=32, budget_tokens=(64, 96, 112), tail_target=0.9
)


def values(output: dict) -> tuple[list[int], list[float]]:
    rows = output["meta_info"]["output_token_logprobs"]
    return output["output_ids"], [value for value, *_ in rows]


def answer(engine, option: dict | None = None) -> tuple[list[int], list[float]]:
    params = SAMPLING if option is None else SAMPLING | {"custom_params": {"sparrow": option}}
    return values(engine.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True))


def assert_same(got, expected) -> None:
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.fixture(scope="module")
def fresh(sharp_llama, tmp_path_factory):
    """Answers of engines that were started with each schedule."""
    path = str(tmp_path_factory.mktemp("mine") / "mine.json")
    MINE.save(path)
    answers = {}
    for name, spec in [("fixed-64", "fixed-64"), ("fixed-128", "fixed-128"), ("mine", path)]:
        with start_engine(
            sharp_llama, attention_backend="sparrow", sparrow_schedule=spec
        ) as engine:
            answers[name] = answer(engine)
    # The three answers must differ, or a switch could not be told from no switch.
    first, second, third = (log_probs for _, log_probs in answers.values())
    for one, other in ((first, second), (first, third), (second, third)):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-2
    return answers


def two_schedules(model: str):
    return start_engine(model, attention_backend="sparrow", sparrow_schedule="fixed-64,fixed-128")


@pytest.fixture(scope="module")
def shared_engine(sharp_llama):
    with two_schedules(sharp_llama) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """The engine as it was started, whatever the test before left active or loaded."""
    for budget_tokens in (128, 64):
        set_schedule(shared_engine, BudgetSchedule.fixed(budget_tokens))
    return shared_engine


def test_switching_equals_a_fresh_engine(fresh, engine, tmp_path):
    assert get_schedule(engine) == BudgetSchedule.fixed(64)
    assert_same(answer(engine), fresh["fixed-64"])
    # Switch by the name of a loaded schedule. The prompt is the same, so a kept prefix would show.
    assert set_schedule(engine, "fixed-128") == BudgetSchedule.fixed(64)
    again = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True)
    assert again["meta_info"]["cached_tokens"] == 0
    assert_same(values(again), fresh["fixed-128"])
    # Switch by value, then by path: earlier schedules stay loaded, requests may name the new one.
    assert set_schedule(engine, MINE) == BudgetSchedule.fixed(128)
    assert get_schedule(engine) == MINE
    assert_same(answer(engine), fresh["mine"])
    assert_same(answer(engine, {"schedule": "mine"}), fresh["mine"])
    assert_same(answer(engine, {"schedule": "fixed-64"}), fresh["fixed-64"])
    assert "mine" in engine.get_server_info()["sparrow_schedule"]
    MINE.save(tmp_path / "mine.json")
    assert set_schedule(engine, str(tmp_path / "mine.json")) == MINE
    assert_same(answer(engine), fresh["mine"])


def test_pipeline_stages_switch_between_the_same_two_requests(fresh, sharp_llama):
    """The stages hear of a switch one after the other, and later requests follow it in order."""
    with start_engine(
        sharp_llama, attention_backend="sparrow", sparrow_schedule="fixed-64,fixed-128", pp_size=2
    ) as engine:
        assert_same(answer(engine), fresh["fixed-64"])

        async def switch_under_load() -> None:
            manager = engine.tokenizer_manager
            for name in ("fixed-128", "fixed-64", "fixed-128"):
                # The switch waits for `before`, and holds back `after`.
                before = asyncio.ensure_future(generate_some(engine, 2))
                await asyncio.sleep(0.05)
                switched = asyncio.ensure_future(manager.sparrow.calls["schedule"](name))
                await asyncio.sleep(0.01)
                after = asyncio.ensure_future(generate_some(engine, 2))
                old = (await switched)["previous"]["name"]
                for outputs, schedule in ((await before, old), (await after, name)):
                    for output in outputs:
                        assert_same(values(output), fresh[schedule])

        engine.loop.run_until_complete(switch_under_load())


async def generate_some(engine, count: int) -> list[dict]:
    requests = [
        engine.async_generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True)
        for _ in range(count)
    ]
    return await asyncio.gather(*requests)


def test_what_is_switched_from_and_to_is_logged(sharp_llama, capfd):
    # Started here, because pytest captures the output of fixtures apart from that of the test.
    with two_schedules(sharp_llama) as engine:
        assert get_schedule(engine) == BudgetSchedule.fixed(64)
        set_schedule(engine, "fixed-128")
        get_schedule(engine)
        set_schedule(engine, MINE)
        set_schedule(engine, "qwen3-8b-0.86")
    lines = [line for line in capfd.readouterr().err.splitlines() if "is replaced" in line]
    assert len(lines) == 3
    assert "schedule qwen3-8b-0.86 (calibrated for Qwen3-8B, not for this model)" in lines[2]
    for line, old, new in zip(
        lines, ("fixed-64", "fixed-128"), ("fixed-128", "mine"), strict=False
    ):
        assert f"schedule {old} is replaced" in line and f": schedule {new} (" in line


def test_a_loaded_schedule_of_the_same_name_is_replaced(engine, fresh):
    renamed = BudgetSchedule(**(MINE.model_dump() | {"name": "fixed-128"}))
    set_schedule(engine, renamed)
    assert_same(answer(engine, {"schedule": "fixed-128"}), fresh["mine"])
    set_schedule(engine, "fixed-64")
    assert_same(answer(engine, {"schedule": "fixed-128"}), fresh["mine"])


def test_refused_and_nothing_changes(engine, fresh, tmp_path):
    other_layers = BudgetSchedule(**(MINE.model_dump() | {"dense_layers": (0,)}))
    for wrong, reason in [
        ("no-such", "'no-such' is not known to this server: .*fixed-64, fixed-128"),
        (other_layers, r"mine: dense_layers=\[0\] differs from that of fixed-64"),
        (BudgetSchedule.fixed(512, 32), "page_size=32 differs"),
        ("fixed-40", "budget_tokens"),
    ]:
        with pytest.raises(EndpointError, match=reason):
            set_schedule(engine, wrong)
    with pytest.raises(ScheduleError, match="cannot be read"):
        set_schedule(engine, str(tmp_path / "absent.json"))
    assert get_schedule(engine) == BudgetSchedule.fixed(64)
    assert_same(answer(engine), fresh["fixed-64"])


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_while_paused(engine, fresh, mode):
    """A switch is refused while requests are paused, and works when the pause has aborted them."""
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
    )

    manager = engine.tokenizer_manager
    sampling = SAMPLING | {"max_new_tokens": 400}

    async def switch_in_the_middle() -> dict:
        answers = await start_request(engine, input_ids=PROMPT, sampling_params=sampling)
        # Keep reading: a pause that aborts waits until its requests have been answered.
        running = asyncio.ensure_future(last_of(answers))
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        if mode == "in_place":
            with pytest.raises(ValueError, match="paused with requests"):
                await manager.sparrow.calls["schedule"](schedule="fixed-128")
        else:
            await manager.sparrow.calls["schedule"](schedule="fixed-128")
        await manager.continue_generation(ContinueGenerationReqInput())
        return await running

    output = engine.loop.run_until_complete(switch_in_the_middle())
    reason = output["meta_info"]["finish_reason"]["type"]
    expected = ("length", "fixed-64") if mode == "in_place" else ("abort", "fixed-128")
    assert (reason, get_schedule(engine).name) == expected
    assert_same(answer(engine), fresh[expected[1]])


@pytest.fixture(scope="module")
def server(sharp_llama):
    with start_server(
        sharp_llama,
        attention_backend="sparrow",
        sparrow_schedule="fixed-64,fixed-128",
        admin_api_key="key",
    ) as url:
        yield url


def test_over_http(server, fresh):
    with httpx.Client(base_url=server, timeout=60) as client:

        def post(route: str, body: object, key: str = "key") -> httpx.Response:
            return client.post(route, json=body, headers={"Authorization": f"Bearer {key}"})

        def generated() -> tuple[list[int], list[float]]:
            body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
            return values(post("/generate", body).json())

        assert_same(generated(), fresh["fixed-64"])
        # The route needs the key, as SGLang's own control routes do.
        assert client.get("/sparrow/schedule").status_code == 401
        assert post("/sparrow/schedule", {"schedule": "fixed-128"}, "wrong").status_code == 401
        assert_same(generated(), fresh["fixed-64"])

        with pytest.raises(EndpointError, match="answered with 401"):
            get_schedule(server)
        assert get_schedule(server, api_key="key") == BudgetSchedule.fixed(64)
        previous = set_schedule(server, "fixed-128", api_key="key")
        assert previous == BudgetSchedule.fixed(64)
        assert_same(generated(), fresh["fixed-128"])
        set_schedule(server, "fixed-64", api_key="key")

        switched = post("/sparrow/schedule", {"schedule": MINE.model_dump(mode="json")})
        assert switched.status_code == 200
        assert switched.json()["previous"]["name"] == "fixed-64"
        assert switched.json()["loaded"] == ["mine", "fixed-64", "fixed-128"]
        assert_same(generated(), fresh["mine"])
        read = client.get("/sparrow/schedule?full=true", headers={"Authorization": "Bearer key"})
        assert BudgetSchedule(**read.json()["schedule"]) == MINE

        for body in (
            {"schedule": "no-such"},
            {"schedule": {"name": "x"}},
            {"schedule": None},
            [1],
            {"budget": 3},
            {"schedule": BudgetSchedule.fixed(512, 64).model_dump(mode="json")},
        ):
            refused = post("/sparrow/schedule", body)
            assert refused.status_code == 400, body
            assert "expected" in refused.json()["error"]["message"]
        assert_same(generated(), fresh["mine"])

        option = {"custom_params": {"sparrow": {"schedule": "no-such"}}}
        refused = post("/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING | option})
        assert refused.status_code == 400
        assert "one of mine, fixed-64, fixed-128" in refused.json()["error"]["message"]
        # The spelling of the OpenAI client's extra_body.
        completion = {"model": "x", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        refused = post("/v1/completions", completion | option)
        assert refused.status_code == 400
        assert "one of mine, fixed-64, fixed-128" in refused.text
