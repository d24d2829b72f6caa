"""The benchmark of an adapter in a small run: its results add up."""

import json
from pathlib import Path

import pytest
from ascii_task import save_model_of_bytes
from engines import import_for_fork, save_tiny_model

from sparrow_sglang.benchmarks.training import distill_gain

ROOT = Path(__file__).parents[2]
STEPS, RESPONSES, NEW_TOKENS, HELDOUT = 4, 2, 16, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    save_model_of_bytes(folder)
    # With these weights it matters which pages are read.
    return save_tiny_model(folder, spread=0.15)


@pytest.fixture(scope="module")
def result(model, tmp_path_factory) -> dict:
    import_for_fork()
    out = tmp_path_factory.mktemp("gain") / "gain.json"
    arguments = f"""--model {model} --schedules fixed-128 fixed-64 --lr 1e-3 --context 384
        --new-tokens {NEW_TOKENS} --steps 1 {STEPS} --responses {RESPONSES} --steps-per-rollout 3
        --heldout {HELDOUT} --bin-tokens 128 --train-under given --out {out}"""
    assert distill_gain.main(arguments.split()) == 0
    return json.loads(out.read_text())


def test_a_run_says_what_it_took_and_where_the_tails_stand(result):
    (arm,) = result["rows"]
    rows = arm["steps"]
    # The tiny model never ends a response by itself.
    expected = [
        (step, step * RESPONSES, step * RESPONSES * NEW_TOKENS) for step in range(1, STEPS + 1)
    ]
    assert [(row["step"], row["responses"], row["tokens"]) for row in rows] == expected
    assert all(row["kl"] > 0 and row["grad_norm"] > 0 for row in rows)
    # Rollouts come before the first step and, with the adapter of that time, before the fourth.
    assert [row["rollout_s"] > 0.01 for row in rows] == [True, False, False, True]
    assert [each["after"]["step"] for each in arm["tails"]] == [1, STEPS]
    for tails in (result["before"], *arm["tails"]):
        for name in ("given", "bolder"):
            # The first token of a response comes out of prefill.
            assert sum(row["tokens"] for row in tails[name]) == HELDOUT * (NEW_TOKENS - 1)
        given, bolder = (
            sum(row["mean"] * row["tokens"] for row in tails[name]) for name in ("given", "bolder")
        )
        assert bolder < given


def test_a_run_measures_both_deliveries(result):
    for speed in result["decode"].values():
        seconds = HELDOUT * NEW_TOKENS / speed["tokens_per_s"]
        # Decode takes less than the whole time, which includes the prefill. `step_ms` is a
        # difference of two times, so it may be negative on a busy machine.
        assert speed["step_ms"] * (NEW_TOKENS - 1) < 1e3 * seconds
    merged, base = (result["agreement"][distribution] for distribution in ("merged", "base"))
    # Rounding the sum to bf16 moves the distribution less than the adapter does.
    assert 1 - merged["mean"] < 0.5 * (1 - base["mean"])
    assert merged["min"] <= merged["tail"] <= merged["mean"] < 1
    cost = result["cost"]
    assert cost["share_of_dense_update"] == pytest.approx(
        cost["adapter_step_s"] / cost["dense_update_s"]
    )
