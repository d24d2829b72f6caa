"""A policy, sequences, and settings of a DistillSparse adapter."""

from typing import Any

from engines import random_prompt

from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.schedules.schedule import BudgetSchedule

SCHEDULE = BudgetSchedule.fixed(48)
SEQUENCES = [
    (random_prompt(1, 20), random_prompt(2, 150)),
    (random_prompt(3, 120), random_prompt(4, 60)),
]


def new_policy(path: str, dtype: str = "float32", **model: Any) -> DensePolicy:
    config = ModelConfig(path=path, dtype=dtype, **model)
    return DensePolicy.load(config, OptimizerConfig(lr=1e-3), "cpu")


def settings(**fields) -> DistillConfig:
    return DistillConfig(**{"enabled": True, "rank": 4, "alpha": 8, "lr": 3e-3} | fields)
