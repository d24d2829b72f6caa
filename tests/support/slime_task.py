"""A reward by slime's interface in which some groups of samples differ and others do not."""

from typing import Any


async def reward(args: Any, sample: Any) -> float:
    """Whether the last token has an even id."""
    return float(sample.tokens[-1] % 2 == 0)
