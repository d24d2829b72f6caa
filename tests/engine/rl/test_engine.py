"""The rollout engine in this process: what it records, and whose weights it samples from."""

from dataclasses import replace

import engines
import numpy as np
import psutil
import pytest
from engines import SCHEDULE, SERVER_ARGS
from oracle import FP32
from training import ALL, PROMPTS, error, generate, scaled, transformers_logprobs

from sparrow_sglang.benchmarks.rollout import make_requests, replay
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.metrics import round_metrics
from sparrow_sglang.rl.rollout import EngineDied, Sampling
from sparrow_sglang.schedules.schedule import DENSE

SAMPLING = Sampling(max_new_tokens=60)


def local_engine(model: str, schedule: str) -> LocalEngine:
    engines.import_for_fork()
    return LocalEngine(model, schedule, **SERVER_ARGS)


@pytest.fixture(scope="module")
def engine(sharp_llama):
    engine = local_engine(sharp_llama, ALL)
    yield engine
    engine.close()


def test_after_an_update_the_engine_samples_from_the_new_weights(engine, model, capfd):
    changed = scaled(model)
    try:
        engine.update_weights(list(changed.state_dict().items())[:20], "half")
        if hasattr(engine.engine, "end_weight_update"):
            assert "20 of 39 tensors were updated" in capfd.readouterr().err
        # The prompts are in the prefix cache now, with the old weights' KV.
        generate(engine, PROMPTS, 2, SAMPLING)
        engine.update_weights(changed.state_dict().items(), "7")
        assert "tensors were updated" not in capfd.readouterr().err
        groups = generate(engine, PROMPTS, 2, SAMPLING)
        assert {r.weight_version for group in groups for r in group.rollouts} == {"7"}
        assert error(changed, groups) < FP32
        assert error(model, groups) > 100 * FP32
    finally:
        engine.update_weights(model.state_dict().items(), "8")
    assert error(model, generate(engine, PROMPTS, 2, SAMPLING)) < FP32


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probs_are_those_of_the_tempered_distribution(engine, model, temperature) -> None:
    (group,) = generate(engine, PROMPTS[:1], 4, Sampling(60, temperature))
    for rollout in group.rollouts:
        expected = transformers_logprobs(model, rollout, temperature)
        np.testing.assert_allclose(rollout.logprobs, expected, atol=FP32)


@pytest.mark.parametrize("stopped", [False, True])
def test_an_update_may_follow_an_abandoned_rollout(engine, model, stopped) -> None:
    looks = iter([False, stopped])
    long = Sampling(max_new_tokens=200)
    groups = engine.stream(PROMPTS * 4, 2, long, is_stopped=lambda: next(looks, False))
    assert stopped == (next(groups, None) is None)
    groups.close()
    engine.update_weights(model.state_dict().items(), "9")
    assert error(model, generate(engine, PROMPTS, 1, SAMPLING)) < FP32


def test_after_a_failed_update_nothing_is_generated_until_a_good_one(engine, model) -> None:
    name, weight = next(iter(model.state_dict().items()))
    with pytest.raises(ZeroDivisionError):
        engine.update_weights(((name, weight * (1 / i)) for i in (1, 0)), "bad")
    with pytest.raises(AssertionError, match="update_weights first"):
        generate(engine, PROMPTS, 1, SAMPLING)
    engine.update_weights(model.state_dict().items(), "10")
    assert error(model, generate(engine, PROMPTS, 1, SAMPLING)) < FP32


def test_an_engine_that_finishes_nothing_in_time_counts_as_dead(engine) -> None:
    scheduler = psutil.Process(engine.engine.get_all_child_pids()[0])
    scheduler.suspend()
    try:
        with pytest.raises(EngineDied, match="rollout.timeout_s"):
            generate(engine, PROMPTS, 1, replace(SAMPLING, timeout_s=2.0))
    finally:
        scheduler.resume()


def test_lossless_rollouts_are_those_of_the_weights_that_were_loaded(model, sharp_llama, tmp_path):
    """Recorded log-probs are dense ones."""
    SCHEDULE.save(tmp_path / "test.json")
    arguments = SERVER_ARGS | {"speculative_algorithm": "SPARROW"}
    engines.import_for_fork()
    lossless = LocalEngine(sharp_llama, str(tmp_path / "test.json"), **arguments)
    changed = scaled(model)
    try:
        for version, served in (("1", model), ("2", changed)):
            lossless.update_weights(served.state_dict().items(), version)
            groups = generate(lossless, PROMPTS, 2, Sampling(60, 0.7))
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            for rollout in rollouts:
                expected = transformers_logprobs(served, rollout, 0.7)
                np.testing.assert_allclose(rollout.logprobs, expected, atol=FP32 / 0.7)
                assert rollout.schedule == DENSE
            assert 1 < round_metrics(rollouts)["sparrow/tokens_per_round"] < 9
        replayed = replay(lossless.engine, make_requests([40, 9], [engines.random_prompt(0, 100)]))
        assert 1 < replayed["tokens_per_round"] < 9
    finally:
        lossless.close()
