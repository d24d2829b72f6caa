"""A task without data files, quick to learn for small models: a story with all of some words."""

import random
import re
from collections.abc import Iterator
from itertools import combinations, islice
from math import comb

from pydantic import Field

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import Section, TaskSource
from sparrow_sglang.rl.tasks.base import Render, Task, parse_options
from sparrow_sglang.rl.types import Prompt

WORDS = tuple(
    "apple river stone cloud table green horse music paper light water bread chair tiger ocean"
    " piano window garden bridge candle forest silver mountain pencil orange castle rabbit desert"
    " engine flower hammer island jacket kitchen ladder mirror needle button pillow rocket saddle"
    " tunnel violin wagon yellow zebra anchor basket copper dragon".split()
)


class StoryOptions(Section):
    words: int = Field(default=2, ge=1, le=8)
    """Words that a story must hold; more make it harder."""
    min_length: int = Field(default=60, ge=0)
    """Words that a story must have in all, so that listing the given ones is no story."""
    train: int = Field(default=960, ge=1, le=100_000)
    """Training prompts."""
    heldout: int = Field(default=256, ge=1, le=100_000)
    """Held-out prompts, of other words together than any training prompt."""
    seed: int = 0
    """Seed of the choice of words."""


def load(config: TaskSource, render: Render) -> Task:
    """The same prompts on any machine. Raises `InputError` on too few choices of words."""
    options = parse_options(StoryOptions, config)
    count = options.train + options.heldout
    prompts: list[Prompt] = []
    for words in islice(_choices(options.words, options.seed), count):
        text = f"Write a short story that uses all of these words: {', '.join(words)}."
        payload = {"words": words, "min_length": options.min_length}
        ids = render([{"role": "user", "content": text}])
        prompts.append(Prompt("-".join(words), config.name, ids, payload))
    if len(prompts) < count:
        raise InputError(
            f"task.options.train={options.train} and heldout={options.heldout}: expected at most"
            f" {len(prompts)} together"
        )
    # Held-out prompts first, so that they stay the same whatever the number of training prompts.
    return Task(tuple(prompts[options.heldout :]), tuple(prompts[: options.heldout]), reward)


def reward(prompt: Prompt, text: str) -> float:
    words = re.findall(r"[a-z]+", text.lower())
    used = set(prompt.payload["words"]) <= set(words)
    return float(used and len(words) >= prompt.payload["min_length"])


def _choices(count: int, seed: int) -> Iterator[tuple[str, ...]]:
    """Different sets of words, in a random order that depends on `seed` only."""
    random_ = random.Random(seed)
    total = comb(len(WORDS), count)
    if total <= 50_000:
        everything = list(combinations(WORDS, count))
        random_.shuffle(everything)
        yield from everything
        return
    seen: set[frozenset[str]] = set()
    while len(seen) < total:
        words = tuple(random_.sample(WORDS, count))
        if frozenset(words) not in seen:
            seen.add(frozenset(words))
            yield words
