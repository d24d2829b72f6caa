"""GRPO from sparse rollouts: a light driver whose loop is the algorithm.

Data flow: engine -> rollouts -> dense log-probs -> correction -> advantages -> loss -> optimizer
-> weights -> engine. SGLang is touched by the rollout engines only.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow_sglang.rl.config import TrainConfig

__all__ = ["TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    # Late: torch and transformers take seconds to import, and a configuration needs neither. The
    # sandbox starts a process for each program, for which even pydantic would be too much.
    if name == "TrainConfig":
        from sparrow_sglang.rl.config import TrainConfig

        return TrainConfig
    if name == "train":
        from sparrow_sglang.rl.trainer import train

        return train
    raise AttributeError(name)
