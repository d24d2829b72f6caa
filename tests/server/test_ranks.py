"""Calls to a running engine of several ranks: all of them do it, or none."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import (
    INT4_SCHEDULE,
    import_for_fork,
    random_prompt,
    save_tiny_model,
    sparse,
    start_engine,
    weight_updates,
)
from oracle import ContractModel

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import EndpointError
from sparrow_sglang.plugin.scheduler_calls import rank_name
from sparrow_sglang.schedules.schedule import BudgetSchedule

PROMPT = random_prompt(0, 100)
TARGETS = ("q_proj", "v_proj")


def schedule(name: str) -> BudgetSchedule:
    return BudgetSchedule(**(BudgetSchedule.fixed(96).model_dump() | {"name": name}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with heads for two tensor-parallel ranks."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}
    return save_tiny_model(tmp_path_factory.mktemp("two-ranks"), spread=0.15, **shape)


@pytest.fixture(scope="module")
def failing() -> Iterator[None]:
    """Make schedulers, which are forked from this process, fail on some schedules. fails-dp-rank-1
    cannot be loaded on that rank; stays-dp-rank-1 cannot be loaded on the others, and that rank
    cannot go back from it to fixed-64."""
    from sglang.srt.managers.scheduler import Scheduler

    # Hooks stay beneath what is patched here, and outlive it.
    import_for_fork()
    load, start, started = BudgetTable.load, Scheduler.__init__, []

    @functools.wraps(start)
    def remembered(self: Any, *args: Any, **more: Any) -> None:
        start(self, *args, **more)
        started.append(self)

    def failing_load(budgets: Any, schedule: Any) -> None:
        fault, _, where = schedule.name.partition("-")
        if fault in ("fails", "stays"):
            here = where.replace("-", " ") in rank_name(started[-1])
            if here == (fault == "fails"):
                raise RuntimeError("out of memory")
        if started and budgets.schedule.name.startswith("stays") and schedule.name == "fixed-64":
            raise RuntimeError("cannot go back")
        load(budgets, schedule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "__init__", remembered)
        patch.setattr(BudgetTable, "load", failing_load)
        yield


@pytest.fixture(scope="module")
def replicas(model: str, failing: None) -> Iterator[Any]:
    with start_engine(model, **sparse("fixed-64"), dp_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def halves(model: str, failing: None) -> Iterator[Any]:
    """The engine started last: SGLang 0.5.23 asks its LoRA settings, whichever engine is meant."""
    with start_engine(
        model,
        **sparse("fixed-64"),
        tp_size=2,
        enable_lora=True,
        max_lora_rank=4,
        lora_target_modules=list(TARGETS),
    ) as engine:
        yield engine


def decoded_by(engine: Any, name: str, *ranks: int) -> None:
    """Each data-parallel rank decodes by the schedule of this name, as its log-probs show."""
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}

    def log_probs(rank: int, option: dict[str, Any]) -> list[float]:
        answer = engine.generate(
            input_ids=PROMPT,
            sampling_params=sampling | {"custom_params": {"sparrow": option}},
            return_logprob=True,
            routed_dp_rank=rank,
        )
        assert answer["meta_info"]["dp_rank"] == rank
        return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]

    for rank in ranks:
        found = log_probs(rank, {"report": True})
        # Both schedules have one budget at all lengths, so a cap of 64 makes one of the other.
        same = found == pytest.approx(log_probs(rank, {"kv_budget_tokens": 64}), abs=1e-5)
        assert same == (name == "fixed-64"), rank


def test_a_failure_on_one_replica_is_rolled_back(replicas: Any) -> None:
    wrong = schedule("fails-dp-rank-1")
    reason = "not switched: dp rank 1, tp rank 0: out of memory"
    with pytest.raises(EndpointError, match=reason):
        set_schedule(replicas, wrong)
    assert get_schedule(replicas) == BudgetSchedule.fixed(64)
    decoded_by(replicas, "fixed-64", 0, 1)


def test_replicas_that_disagree_are_reported_until_one_schedule_is_set(replicas: Any) -> None:
    wrong = schedule("stays-dp-rank-1")
    with pytest.raises(EndpointError, match="dp rank 1, tp rank 0"):
        set_schedule(replicas, wrong)
    different = "different schedules .dp rank 0, tp rank 0: fixed-64; dp rank 1, tp rank 0: stays"
    with pytest.raises(EndpointError, match=different):
        get_schedule(replicas)
    set_schedule(replicas, "fixed-128")
    assert get_schedule(replicas).name == "fixed-128"
    decoded_by(replicas, "fixed-128", 0, 1)
    set_schedule(replicas, "fixed-64")


def test_each_rank_has_the_landmarks_of_its_kv_heads(model: str) -> None:
    """One KV head on each of two ranks, against the contract's loop."""
    with start_engine(model, **sparse(INT4_SCHEDULE), tp_size=2) as engine:
        sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        answer = engine.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    assert ContractModel(model, INT4_SCHEDULE).errors(PROMPT, answer).max() < 2e-4
    assert ContractModel(model).errors(PROMPT, answer).max() > 2e-4


def test_tensor_parallel_ranks_switch_together(halves: Any) -> None:
    """SGLang itself hears the answer of the first rank only."""
    with pytest.raises(EndpointError, match="tp rank 1"):
        set_schedule(halves, schedule("fails-tp-rank-1"))
    assert get_schedule(halves) == BudgetSchedule.fixed(64)
    assert set_schedule(halves, "fixed-128").name == "fixed-64"
    assert get_schedule(halves).name == "fixed-128"


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_that_do_not_fit_on_one_rank_are_loaded_by_none(halves: Any, rank: int) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    name = "model.norm.weight"

    def payload(size: int) -> bytes:
        """Can be read once."""
        payload: bytes = MultiprocessingSerializer.serialize([(name, torch.linspace(-9, 9, size))])
        return payload

    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    before = halves.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]
    with weight_updates(halves):
        for bad, problem in (
            (b"AAAA", "could not load the weights"),
            (payload(3), f"{name} is [3]: expected"),
        ):
            payloads = [payload(128), payload(128)]
            payloads[rank] = bad
            request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads)
            call = halves.tokenizer_manager.update_weights_from_tensor(request, None)
            success, said = halves.loop.run_until_complete(call)
            assert not success and problem in said
    assert halves.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"] == before
