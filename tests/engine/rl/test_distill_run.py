"""A whole training run whose adapter learns from rewards, too."""

import numpy as np
from ascii_task import rows
from training import settings

from sparrow_sglang.rl import adapter_gate, trainer


def test_the_actors_own_policy_loss_is_weighed_by_its_own_distribution(
    byte_model, tmp_path, monkeypatch
):
    # Roll out with the whole adapter, which is the one that learns, and not with half of it.
    monkeypatch.setattr(adapter_gate, "SCALES", (1.0,))
    config = settings(
        byte_model,
        tmp_path / "run",
        "fixed-48",
        steps=2,
        optimizer={"lr": 1e-9},
        distill={"enabled": True, "rank": 4, "lr": 1e-2, "sequences": 16, "policy_loss": 1.0},
        evaluation={"every_steps": 0},
    )
    trainer.train(config)
    for row in rows(config.run_dir):
        # Every response is 60 tokens long and a group's advantages sum to 0, so the loss is 0, but
        # only if each token has weight 1, the ratio of a distribution to itself. Ratios to the
        # dense distribution are far from 1.
        assert abs(row["sparrow/distill_pg_loss"]) < 1e-4
        assert row["rollout_corr/rollout_is_std"] > 0.01
        assert np.isfinite(row["sparrow/distill_grad_norm"])
        assert row["sparrow/distill_grad_norm"] > 0
