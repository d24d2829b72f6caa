"""A policy, sequences and batches, and settings of a DistillSparse adapter."""

from typing import Any

import numpy as np
import torch
from engines import random_prompt

from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.types import Rollout
from sparrow_sglang.schedules.schedule import BudgetSchedule

SCHEDULE = BudgetSchedule.fixed(48)
SEQUENCES = [
    (random_prompt(1, 20), random_prompt(2, 150)),
    (random_prompt(3, 120), random_prompt(4, 60)),
]


def new_policy(path: str, dtype: str = "float32", **model: Any) -> DensePolicy:
    config = ModelConfig(path=path, dtype=dtype, **model)
    return DensePolicy.load(config, OptimizerConfig(lr=1e-3), "cpu")


def batch_of(sequences: list[tuple[list[int], list[int]]]) -> Batch:
    """A batch without advantages, of one response to each prompt."""
    rollouts = tuple(
        Rollout(f"p{i}", 0, tuple(prompt), tuple(ids), np.zeros(len(ids)), "stop", "0", "s", "")
        for i, (prompt, ids) in enumerate(sequences)
    )
    nothing, count = torch.zeros(sum(len(ids) for _, ids in sequences)), len(sequences)
    every = torch.ones(count, dtype=torch.bool)
    return Batch(rollouts, nothing, nothing, torch.arange(count), every)


def settings(**fields) -> DistillConfig:
    return DistillConfig(**{"enabled": True, "rank": 4, "alpha": 8, "lr": 3e-3} | fields)
