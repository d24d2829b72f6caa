"""Which prompts a step trains on: a function of the seed and the step alone."""

import random
from collections.abc import Sequence
from functools import lru_cache

from sparrow_sglang.rl.types import Prompt


def prompts_of_step(prompts: Sequence[Prompt], count: int, step: int, seed: int) -> list[Prompt]:
    """The `count` prompts of `step`, counted from 0.

    Every prompt is used once before any is used again, in a new order each time, so that a run
    that resumes goes on where it was without anything saved.
    """
    places = range(step * count, (step + 1) * count)
    size = len(prompts)
    return [prompts[_order(size, seed, place // size)[place % size]] for place in places]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
