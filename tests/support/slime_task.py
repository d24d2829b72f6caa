"""A reward with slime's interface that differs within some groups of samples but not in others."""

from typing import Any


async def reward(args: Any, sample: Any) -> float:
    """Whether the last token has an even id."""
    return float(sample.tokens[-1] % 2 == 0)
