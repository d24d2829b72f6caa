"""A step's groups are in the prompts' order, whatever completes first, each scored once."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from reward_groups import AtOnce, group

from sparrow_sglang.rl.config import RolloutConfig
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.runs.checkpoint import State
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.trainer import collect, prompts_from
from sparrow_sglang.rl.types import Group, Prompt

SIZE = 40
PROMPTS = tuple(Prompt(str(number), "test", (1,)) for number in range(SIZE))


class Engine:
    """Completes groups in a random order."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.released = False

    def stream(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling
    ) -> Iterator[tuple[int, Group]]:
        self.released = False
        waiting = list(enumerate(prompts))
        self._draw.shuffle(waiting)
        for position, prompt in waiting:
            made = group(prompt.id, 0.0, [prompt.id] * n)
            yield position, Group(prompt, made.rollouts)

    def release(self) -> None:
        self.released = True


class Workers:
    def __init__(self) -> None:
        self.scored: list[str] = []

    @contextmanager
    def scoring(self) -> Iterator[AtOnce]:
        yield AtOnce(self._reward)

    def _reward(self, prompt: Prompt, text: str) -> float:
        self.scored.append(prompt.id)
        return float(text)


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 99))
def test_groups_are_those_of_the_next_prompts_in_their_order(
    count: int, step: int, seed: int
) -> None:
    settings = RolloutConfig(prompts_per_step=count, samples_per_prompt=2)
    log = SimpleNamespace(counted=lambda stage, total, groups: groups)
    config, setup = SimpleNamespace(rollout=settings, seed=3), SimpleNamespace(train=PROMPTS)
    engine, workers, none = Engine(seed), Workers(), None
    state: Any = State(step)
    parts: Any = config, setup, none, engine, workers, log, none, none, state, 0
    found = collect(Run(*parts), lambda stage: nullcontext())  # type: ignore[arg-type]
    expected = prompts_from(PROMPTS, step * count, count, 3)
    assert [one.prompt for one in found.groups] == expected
    # Rewards belong to their groups, and each is computed once: it may be costly.
    assert found.scores.rewards == tuple((float(one.id),) * 2 for one in expected)
    assert sorted(workers.scored) == sorted(2 * [one.id for one in expected])
    # The trainer takes the memory of the engine's KV cache.
    assert engine.released
    assert found.tokens == 2 * count
