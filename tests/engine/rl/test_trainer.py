"""Whole training runs with real engines: what they learn and log."""

import numpy as np
import pytest
import torch
from ascii_task import rows
from oracle import FP32
from training import settings
from transformers import AutoModelForCausalLM

from sparrow_sglang.rl import learner, trainer


def test_a_run_learns_and_says_what_it_saw(byte_model, tmp_path):
    config = settings(byte_model, tmp_path / "run", "fixed-48")
    folder = trainer.train(config)
    written = rows(config.run_dir)
    assert [row["step"] for row in written] == list(range(7))
    passed = [row["eval/pass_rate"] for row in written if "eval/pass_rate" in row]
    assert len(passed) == 3
    assert passed[0] < 0.65 and passed[-1] > passed[0] + 0.15
    steps = written[:6]
    assert steps[-1]["critic/score/mean"] > steps[0]["critic/score/mean"] + 0.15
    assert all(row["response_length/mean"] == 60 for row in steps)
    assert steps[0]["training/rollout_probs_diff_max"] > 10 * FP32
    for row in steps:
        assert 0 < row["sparrow/accept_p05"] <= row["sparrow/accept_mean"] <= 1
        # The estimate uses the engine's samples, the mean whole distributions in the trainer.
        estimate = row["sparrow/accept_mean_estimate"]
        assert estimate == pytest.approx(row["sparrow/accept_mean"], abs=0.03)
        assert row["sparrow/kv_tokens_read"] < 48 < row["sparrow/kv_tokens_cached"]
    trained = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(byte_model).state_dict()
    assert any(not torch.equal(trained[name], start[name]) for name in start)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    logged = [event.value for event in events.Scalars("critic/score/mean")]
    np.testing.assert_allclose(logged, [row["critic/score/mean"] for row in steps], rtol=1e-6)


@pytest.mark.parametrize(
    ("delivery", "gated"), [("merged", True), ("merged", False), ("lora", False)]
)
def test_rollouts_use_the_adapter_and_evaluation_does_not(
    byte_model, tmp_path, monkeypatch, delivery, gated
):
    if not gated:
        monkeypatch.setattr(
            learner, "choose_scale", lambda adapter, *rest: setattr(adapter, "scale", 1.0) or {}
        )
    config = settings(
        byte_model,
        tmp_path / "run",
        "fixed-48",
        steps=4,
        optimizer={"lr": 1e-9},
        distill={"enabled": True, "rank": 4, "lr": 1e-2, "sequences": 16, "delivery": delivery},
        evaluation={"every_steps": 4, "temperature": 0.0},
    )
    folder = trainer.train(config)
    written = rows(config.run_dir)
    steps = written[:4]
    # Such a large learning rate moves the adapter so far that acceptance rates fall, unless the
    # gate scales it down or turns it off.
    fall = steps[0]["sparrow/accept_p05"] - min(row["sparrow/accept_p05"] for row in steps)
    assert fall < 0.05 if gated else fall > 0.1
    for row in steps:
        # The engine's distribution is that of the adapted model in the trainer.
        estimate = row["sparrow/accept_mean_estimate"]
        assert estimate == pytest.approx(row["sparrow/accept_mean"], abs=0.03)
    # Evaluation is greedy and without the adapter, and the policy itself has hardly moved.
    assert written[0]["eval/pass_rate"] == written[4]["eval/pass_rate"]
    assert (folder / "adapter" / "adapter_config.json").exists()
    trained = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(byte_model).state_dict()
    assert trained.keys() == start.keys()
    assert all(torch.allclose(trained[name], start[name], atol=1e-6) for name in start)
