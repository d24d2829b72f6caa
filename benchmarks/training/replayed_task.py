"""A task for timed runs: random prompts, and rewards from which nothing can be learnt.

It has its own small module because reward workers import it.
"""

import random
import zlib

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.base import Render, Task
from sparrow_sglang.rl.types import Prompt

NAME = f"{__name__}:load"


def load(config: TaskSource, render: Render) -> Task:
    """The task: random prompts, one for each group of a step."""
    options = config.options
    draw = random.Random(options["seed"])
    prompts = tuple(
        Prompt(
            str(number),
            config.name,
            tuple(draw.choices(range(options["vocab_size"]), k=options["tokens"])),
        )
        for number in range(options["prompts"])
    )
    return Task(train=prompts, heldout=(), reward=reward)


def reward(prompt: Prompt, text: str) -> float:
    """0 or 1 by a hash of the text, like a coin toss, so that groups have reward variance."""
    return float(zlib.crc32(text.encode()) % 2)
