"""Steps whose requests leave nothing out decode by the stock kernel, up to a measured length."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ON_CPU, save_tiny_model, sparse, start_engine

from sparrow_sglang.attention_backends.backend import SparrowAttnBackend
from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.client.control import get_schedule, set_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.plugin.scheduler import graphs, timing
from sparrow_sglang.plugin.state import require_server_state
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

DENSE_TOKENS = 128
FIXED = BudgetSchedule.fixed(64)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, 0.9, 0.8], 0),
        ([1.2, 1.019, 0.8], 1280),
        # Beyond the first sparse step that is not slower, a slower one is noise.
        ([1.2, 0.9, 1.1], 1280),
        ([1.2, 1.1, 1.1], 2048),
        ([], 0),
    ],
)
def test_decode_is_dense_up_to_the_first_sparse_step_that_is_not_slower(
    ratios: list[float], expected: int
) -> None:
    lengths = [1024, 1536, 2048][: len(ratios)]
    assert timing.crossover(lengths, ratios) == expected


def test_a_step_is_dense_only_where_every_request_reads_everything() -> None:
    budgets = BudgetTable(FIXED.dense_below(DENSE_TOKENS), 8, "cpu")
    backend = SimpleNamespace(budgets=budgets, dense_override=None)
    runner = object.__new__(graphs.DecodeGraphs)
    runner._sparrow = backend

    def is_dense(*lengths: int) -> bool:
        batch: Any = SimpleNamespace(seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64))
        label = runner._resolve_attention_variant(batch, len(lengths))
        assert label in runner.attention_graph_variants.capture_labels
        return bool(backend.dense_step)

    assert is_dense(1, DENSE_TOKENS) and not is_dense(1, DENSE_TOKENS + 1) and not is_dense()
    budgets.set_options([3], [RequestOption(budgets.schedule, 48)])
    assert not is_dense(1)
    budgets.set_options([3], [RequestOption(None)])
    assert is_dense(1)
    budgets.set_options([3], [RequestOption(budgets.schedule, 48)])
    budgets.load(FIXED)
    assert is_dense(64) and not is_dense(65)
    assert budgets.num_selected(torch.tensor([4]), torch.tensor([3])).max() == 4


@pytest.fixture
def planned_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU captures no graphs: plan eager steps as their replay does."""
    plan = SparrowAttnBackend.init_forward_metadata

    def plan_densely(backend: Any, batch: Any) -> None:
        plan(backend, batch)
        longest = int(batch.seq_lens_cpu.max())
        if batch.forward_mode.is_decode() and backend.budgets.reads_everything(longest):
            backend.dense_step = True
            backend.dense.init_forward_metadata(batch)

    monkeypatch.setattr(SparrowAttnBackend, "init_forward_metadata", plan_densely)
    monkeypatch.setattr(timing, "measure_dense_tokens", lambda _: DENSE_TOKENS)


@ON_CPU
def test_a_schedule_that_was_set_before_the_measurement_stays(
    planned_densely: None, tiny_llama: str
) -> None:
    with start_engine(tiny_llama, **sparse(FIXED.name)) as engine:
        # As while memory is released.
        set_schedule(engine, "fixed-96")
        require_server_state(engine.tokenizer_manager).measures_dense = True
        engine.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 1})
        assert get_schedule(engine) == BudgetSchedule.fixed(96).dense_below(DENSE_TOKENS)


@ON_CPU
def test_a_request_goes_from_dense_to_sparse_steps(
    planned_densely: None, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path, spread=0.15, head_dim=64, hidden_size=144)
    draw = random.Random(0)
    prompt = [draw.randrange(3, 250) for _ in range(40)]
    sampling = {"temperature": 0, "max_new_tokens": 150}
    with start_engine(model, **sparse(FIXED.name)) as engine:
        require_server_state(engine.tokenizer_manager).measures_dense = True

        def generate(**option: Any) -> tuple[list[int], dict[str, Any]]:
            custom = {"custom_params": {"sparrow": {"report": True, **option}}}
            answer = engine.generate(input_ids=prompt, sampling_params=sampling | custom)
            return answer["output_ids"], answer["meta_info"]["sparrow"]

        ids, usage = generate()
        # KV of an answer that was dense to its end is another request's prefix, with its landmarks.
        short = {"temperature": 0, "max_new_tokens": 60}
        answered = engine.generate(input_ids=prompt, sampling_params=short)["output_ids"]
        turn = engine.generate(input_ids=prompt + answered, sampling_params=short)
        assert turn["meta_info"]["cached_tokens"] >= 80
        connect(engine).call_sparrow("landmarks")
        dense_ids, _ = generate(dense=True)
        as_dense = DENSE_TOKENS - len(prompt) + 1
        assert ids[:as_dense] == dense_ids[:as_dense] and ids != dense_ids
        lengths = range(len(prompt) + 1, len(prompt) + 150)
        read = [n if n <= DENSE_TOKENS else int(FIXED.tokens_read(n)) for n in lengths]
        assert usage["kv_tokens_read_mean"] == round(sum(read) / len(read), 1)
        assert get_schedule(engine) == FIXED.dense_below(DENSE_TOKENS)
        # A schedule that was read can be set again, and each has the server's dense lengths.
        previous = set_schedule(engine, "fixed-96")
        assert get_schedule(engine).dense_tokens == DENSE_TOKENS
        set_schedule(engine, previous)
        assert generate()[0] == ids
        set_schedule(engine, FIXED.dense_below(2 * DENSE_TOKENS))
        assert get_schedule(engine).dense_tokens == 2 * DENSE_TOKENS
        set_schedule(engine, FIXED)
        assert get_schedule(engine).dense_tokens == DENSE_TOKENS
    assert f"dense up to {DENSE_TOKENS} tokens" in capfd.readouterr().err
