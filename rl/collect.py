"""A step's groups: each is scored as soon as it is complete, while others are still sampled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sparrow_sglang.rl.runs.log import Clock
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.tasks.rewards import Scores
from sparrow_sglang.rl.types import Group, Prompt


@dataclass(frozen=True, eq=False)
class Collected:
    """The groups of a step, in the order of its prompts, and their scores."""

    groups: Sequence[Group]
    scores: Scores

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)


def collect(run: Run, clock: Clock) -> Collected:
    """Groups of the run's next prompts; the engine has released its memory."""
    settings = run.config.rollout
    count = settings.prompts_per_step
    prompts = prompts_from(run.setup.train, run.prompts_used, count, run.config.seed)
    total = count * settings.samples_per_prompt
    groups: dict[int, Group] = {}
    with run.reward_workers.scoring() as scoring:
        with clock("rollout"):
            for position, group in run.log.counted("rollout", total, run.stream(prompts)):
                groups[position] = group
                scoring.add(position, group)
        with clock("reward"):
            scores = scoring.scores()
    return Collected([groups[position] for position in range(count)], scores)


def prompts_from(prompts: Sequence[Prompt], first: int, count: int, seed: int) -> list[Prompt]:
    """`count` prompts from the run's prompt number `first` on: all once before any again, each time
    in a new order that depends on `seed` only."""
    size = len(prompts)
    numbers = range(first, first + count)
    return [prompts[_order(size, seed, number // size)[number % size]] for number in numbers]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
