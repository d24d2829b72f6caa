"""GRPO from sparse rollouts: a light driver. Only the rollout engines use SGLang."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow_sglang.rl.config import TrainConfig

__all__ = ["TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    # Imports are lazy: torch and transformers take seconds to import, and a configuration needs
    # neither. The sandbox starts one process per program, where even pydantic would cost too much.
    if name == "TrainConfig":
        from sparrow_sglang.rl.config import TrainConfig

        return TrainConfig
    if name == "train":
        from sparrow_sglang.rl.trainer import train

        return train
    raise AttributeError(name)
