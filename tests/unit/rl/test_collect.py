"""A step's groups: in the prompts' order whatever comes first, and those replaced that teach
nothing."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from math import ceil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_groups import group

from sparrow_sglang.rl.collect import (
    Collected,
    collect,
    collect_partial,
    prompts_from,
    with_penalties,
)
from sparrow_sglang.rl.config import RolloutConfig
from sparrow_sglang.rl.metrics import rollout_metrics
from sparrow_sglang.rl.rollout import NO_CALLBACKS, Callbacks, Sampling
from sparrow_sglang.rl.runs.checkpoint import State
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.tasks.rewards import Scores
from sparrow_sglang.rl.types import ABORTED, Group, Prompt, Rewards, Segment

SIZE = 40
PROMPTS = tuple(Prompt(str(number), "test", (1,)) for number in range(SIZE))


class Lagging:
    """Scoring in which the rewards of a group are known once it has been asked for them `lag`
    times."""

    def __init__(self, reward: Callable[[Group], list[Any]], lag: int, scored: list[str]) -> None:
        self._reward, self._lag, self._scored = reward, lag, scored
        self._groups: list[Group] = []
        self._asked: dict[int, int] = {}
        self._known = 0

    def add(self, group: Group) -> int:
        self._groups.append(group)
        self._scored.append(group.prompt.id)
        return len(self._groups) - 1

    def rewards(self, number: int) -> Any:
        self._asked[number] = self._asked.get(number, -1) + 1
        known = number < self._known or self._asked[number] >= self._lag
        return tuple(self._reward(self._groups[number])) if known else None

    def wait(self) -> None:
        self._known = len(self._groups)

    def scores(self, numbers: Sequence[int]) -> Scores:
        return Scores(tuple(tuple(self._reward(self._groups[number])) for number in numbers))


class Workers:
    def __init__(self, reward: Callable[[Group], list[Any]], lag: int) -> None:
        self._reward, self._lag = reward, lag
        self.scored: list[str] = []

    @contextmanager
    def scoring(self) -> Iterator[Lagging]:
        yield Lagging(self._reward, self._lag, self.scored)


class Engine:
    """Completes groups in a random order, and asks for further prompts after each."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.sampled: list[str] = []
        self.version = "0"
        self.tokens = 0
        self.released = False
        self.asked: list[list[tuple[int, bool]]] = []

    def _group(self, prompt: Prompt) -> Group:
        self.sampled.append(prompt.id)
        reason = "length" if int(prompt.id) % 3 == 0 else "stop"
        made = group(prompt.id, 0.0, ["0", "1"], reason)
        return Group(prompt, made.rollouts)

    def stream(
        self, groups: Sequence[Group], sampling: Sampling, callbacks: Callbacks
    ) -> Iterator[tuple[int, Group]]:
        self.released = False
        if callbacks.should_stop is not NO_CALLBACKS.should_stop:
            self.asked = [
                [(len(one.response_ids), one.finished) for one in group.rollouts]
                for group in groups
            ]
            yield from self._until(callbacks.should_stop, groups)
            return
        waiting = list(enumerate(groups))
        asked = len(waiting)
        while True:
            more = callbacks.more_groups(not waiting)
            waiting += enumerate(more, asked)
            asked += len(more)
            if not waiting:
                return
            position, group = waiting.pop(self._draw.randrange(len(waiting)))
            yield position, self._group(group.prompt)

    def _until(
        self, should_stop: Callable[[], bool], groups: Sequence[Group]
    ) -> Iterator[tuple[int, Group]]:
        waiting = list(enumerate(groups))
        while waiting and not should_stop():
            position, group = waiting.pop(self._draw.randrange(len(waiting)))
            yield position, self._longer(group, "stop", 1)
        for position, group in waiting:
            # One more is finished while the engine stops.
            reason = "stop" if self._draw.random() < 0.2 else ABORTED
            tokens = self._draw.randrange(3) + (reason == "stop")
            yield position, self._longer(group, reason, tokens)

    def _longer(self, group: Group, reason: str, tokens: int) -> Group:
        self.tokens += tokens * sum(not rollout.finished for rollout in group.rollouts)
        return replace(
            group,
            rollouts=tuple(
                rollout
                if rollout.finished
                else replace(
                    rollout,
                    response_ids=(*rollout.response_ids, *[7] * tokens),
                    logprobs=np.zeros(len(rollout.logprobs) + tokens),
                    segments=(
                        *rollout.segments,
                        *[Segment(0, tokens, self.version, "dense")] * min(1, tokens),
                    ),
                    finish_reason=reason,
                )
                for rollout in group.rollouts
            ),
        )

    def release(self) -> None:
        self.released = True


def run_of(reward: Callable[[Group], list[Any]], lag: int = 0, seed: int = 0, **fields: Any) -> Any:
    settings = RolloutConfig(**{"prompts_per_step": 4, "samples_per_prompt": 2} | fields)
    log = SimpleNamespace(response_counter=lambda *_: lambda count: None)
    return Run(
        SimpleNamespace(rollout=settings, seed=0),
        SimpleNamespace(train=PROMPTS),
        None,
        Engine(seed),
        Workers(reward, lag),
        log,
        None,
        None,
        State(),
        0,
    )


def clock(stage: str) -> Any:
    return nullcontext()


def names(collected: Collected) -> list[str]:
    return [group.prompt.id for group in collected.groups]


def order_of_data() -> list[str]:
    return [prompt.id for prompt in prompts_from(PROMPTS, 0, SIZE, 0)]


def by_name(group: Group) -> list[float]:
    return [float(group.prompt.id), 100.0]


@given(
    st.sets(st.integers(0, SIZE - 1)), st.integers(1, 5), st.integers(2, 4), st.integers(0, 3),
    st.integers(0, 99), st.integers(0, 7),
)  # fmt: skip
def test_the_first_groups_with_variance_in_the_order_of_the_data_are_taken(
    same: set[int], count: int, batches: int, lag: int, seed: int, replaced: int
) -> None:
    def reward(group: Group) -> list[float]:
        return [0.5, 0.5] if int(group.prompt.id) in same else [0.0, 1.0]

    run = run_of(reward, lag, seed, prompts_per_step=count, dynamic_sampling=batches)
    found = collect(run, replaced, clock)
    # Walk the data until there are enough useful groups, or no more prompts may be sampled.
    allowed = order_of_data()[replaced : replaced + count * batches]
    useful, walked = [], 0
    for name in allowed:
        walked += 1
        useful += [name] if int(name) not in same else []
        if len(useful) == count:
            break
    assert sorted(run.engine.sampled) == sorted(allowed[:walked])
    # The trainer takes the memory of the engine's KV cache.
    assert run.engine.released
    assert len(found.groups) == count and found.replaced == walked - count
    assert [name for name in names(found) if int(name) not in same] == useful
    assert found.metrics["sparrow/replaced_groups"] == walked - count
    # Groups are in the order of the data, because mini-batches are cut in that order.
    assert names(found) == sorted(names(found), key=allowed.index)
    assert found.tokens == 2 * walked


def test_groups_without_rewards_fill_a_step_last() -> None:
    first = order_of_data()[:2]
    run = run_of(
        lambda group: [None, None] if group.prompt.id in first else [0.0, 0.0],
        prompts_per_step=2,
        dynamic_sampling=2,
    )
    found = collect(run, 0, clock)
    assert rollout_metrics(found.groups, found.rewards)["critic/score/mean"] == 0.0


@given(st.integers(1, 6), st.floats(1.01, 2.0), st.integers(1, 3), st.integers(0, 99))
def test_groups_that_are_carried_over_are_trained_on_in_time(
    count: int, oversubscribe: float, staleness: int, seed: int
) -> None:
    fields = {"oversubscribe": oversubscribe, "max_staleness": staleness}
    # The penalty of some responses, by their length.
    fields |= {"overlong_tokens": 4096, "overlong_penalty": 0.5}
    run = run_of(by_name, seed=seed, prompts_per_step=count, **fields)
    most, trained = ceil(count * Fraction(str(oversubscribe))), []
    for step in range(6):
        run.engine.version, before = str(step), run.engine.tokens
        found = collect_partial(run, count * step, step, clock)
        everything = [*found.groups, *found.carried]
        assert len(found.groups) == count and len(everything) == most
        assert all(group.finished for group in found.groups)
        settings = run.config.rollout
        assert found.rewards == tuple(
            with_penalties(settings, tuple(by_name(group)), group) for group in found.groups
        )
        assert found.rewards != tuple(tuple(by_name(group)) for group in found.groups)
        assert found.tokens == run.engine.tokens - before
        assert run.engine.released
        ages = [
            step - int(segment.weight_version)
            for group in found.groups
            for segment in group.rollouts[0].segments
        ]
        assert max(ages) <= staleness and found.metrics["sparrow/staleness_max"] == max(ages)
        stale = np.average(
            np.array(ages) > 0,
            weights=[s.end for group in found.groups for s in group.rollouts[0].segments],
        )
        assert found.metrics["sparrow/stale_token_fraction"] == pytest.approx(stale)
        assert found.metrics["sparrow/carried_tokens"] == sum(g.tokens for g in found.carried)
        trained += names(found)
        # Each group is scored once: a reward may be costly, and its errors are counted.
        assert sorted(run.reward_workers.scored) == sorted(trained)
        run.state.carried = found.carried
        # No group is lost or used twice, and each was the next in the order of the data.
        under_way = trained + [group.prompt.id for group in found.carried]
        expected = prompts_from(PROMPTS, 0, count * step + most, 0)
        assert sorted(under_way) == sorted(prompt.id for prompt in expected)


def test_penalties_lower_rewards_of_long_responses_linearly() -> None:
    """DAPO's equation 13, of 4 tokens before a limit of 10: 0 at 6 tokens, -1 at 10."""
    lengths = [5, 6, 7, 8, 10]
    one = Group.begun(PROMPTS[0], len(lengths))
    rollouts = tuple(
        replace(
            rollout,
            response_ids=(7,) * length,
            logprobs=np.zeros(length),
            weight_version="0",
            finish_reason="length" if length == 10 else "stop",
        )
        for rollout, length in zip(one.rollouts, lengths, strict=True)
    )
    one = replace(one, rollouts=rollouts)
    fields = {"max_new_tokens": 10, "overlong_tokens": 4, "overlong_penalty": 0.5}
    for truncated, last in (("keep", 0.5), ("penalty", -0.5)):
        settings = RolloutConfig(truncated=truncated, **fields)
        found = with_penalties(settings, (1.0,) * 5, one)
        assert found == pytest.approx((1.0, 1.0, 0.875, 0.75, last))
    assert with_penalties(RolloutConfig(), (1.0,) * 5, one) == (1.0,) * 5


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0, 1.0), (1.0, 0.0, 0.0)),
        ((1.0, -1.0, 1.0), (1.0, -1.0, -1.0)),
        ((1.0, -1.0, None), (1.0, -1.0, -1.0)),
        ((None, 1.0, 1.0), (None, 1.0, 0.0)),
    ],
)
def test_a_truncated_response_earns_no_more_than_a_wrong_one(
    rewards: Rewards, expected: Rewards
) -> None:
    one = Group.begun(PROMPTS[0], 3)
    last = replace(one.rollouts[2], finish_reason="length")
    one = replace(one, rollouts=(*one.rollouts[:2], last))
    assert with_penalties(RolloutConfig(truncated="penalty"), rewards, one) == expected
