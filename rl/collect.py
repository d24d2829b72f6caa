"""A step's groups: each is scored as soon as it is complete, while others are still sampled. With
dynamic sampling, zero-advantage groups are replaced by those of the next prompts (DAPO,
arXiv:2503.14476). Partial rollouts take the groups that finish first, and continue the others
(Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521)."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from math import ceil

import numpy as np

from sparrow_sglang.rl.advantages import rewards_differ
from sparrow_sglang.rl.config import RolloutConfig
from sparrow_sglang.rl.rollout import Callbacks
from sparrow_sglang.rl.runs.log import Clock
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.tasks.rewards import Scoring
from sparrow_sglang.rl.types import Group, Prompt, Rewards, Rollout, known_rewards


@dataclass(frozen=True, eq=False)
class Collected:
    """The groups of a step; `rewards` include the penalties of `RolloutConfig`. `tokens` counts all
    response tokens sampled, `replaced` the groups replaced by others. `carried` groups are
    continued in the next step."""

    groups: list[Group]
    rewards: tuple[Rewards, ...]
    parts: tuple[tuple[Mapping[str, float], ...], ...]
    metrics: dict[str, float]
    tokens: int
    replaced: int = 0
    carried: tuple[Group, ...] = ()


def collect(run: Run, first: int, clock: Clock) -> Collected:
    """Groups from the run's prompt number `first` on; the engine has released its memory."""
    with run.reward_workers.scoring() as scoring:
        sampled = _Sampled(run, scoring, first)
        begun = sampled.begin(run.config.rollout.prompts_per_step)
        with clock("rollout"):
            callbacks = Callbacks(finished_counter(run), sampled.more_groups)
            for position, group in run.stream(begun, callbacks):
                sampled.add(position, group)
        with clock("reward"):
            scoring.wait()
        return sampled.result()


class _Sampled:
    """The complete groups of a step by position, the order in which their prompts were started."""

    def __init__(self, run: Run, scoring: Scoring, first: int) -> None:
        self._run, self._scoring, self._next = run, scoring, first
        self._settings = run.config.rollout
        self._count = self._settings.prompts_per_step
        self._limit = self._count * self._settings.dynamic_sampling
        self._started = 0
        self._groups: dict[int, Group] = {}
        self._numbers: dict[int, int] = {}
        self._rewards: dict[int, Rewards] = {}

    def begin(self, count: int) -> list[Group]:
        groups = new_groups(self._run, self._next, count)
        self._next += count
        self._started += count
        return groups

    def add(self, position: int, group: Group) -> None:
        self._groups[position] = group
        self._numbers[position] = self._scoring.add(group)

    def more_groups(self, idle: bool) -> list[Group]:
        """Replacements for zero-advantage groups, up to the limit. Waits for all scores if the
        engine is `idle`: the last groups may have to be replaced, too."""
        if self._started == self._limit:
            return []
        if idle:
            self._scoring.wait()
        missing = self._count + len(self._zero_advantage()) - self._started
        return self.begin(min(missing, self._limit - self._started))

    def result(self) -> Collected:
        """Zero-advantage groups only fill up the step."""
        zero = self._zero_advantage()
        useful = [position for position in sorted(self._groups) if position not in zero]
        # Groups without any reward last: a step needs some for its statistics.
        zero.sort(key=lambda position: not known_rewards(self._rewards[position]).size)
        chosen = sorted([*useful, *zero][: self._count])
        scores = self._scoring.scores([self._numbers[position] for position in chosen])
        metrics, replaced = scores.metrics(), self._started - self._count
        if self._settings.dynamic_sampling > 1:
            everything = np.concatenate([known_rewards(one) for one in self._rewards.values()])
            metrics |= {
                "sparrow/replaced_groups": float(replaced),
                "sparrow/sampled_score_mean": float(everything.mean()),
            }
        return Collected(
            [self._groups[position] for position in chosen],
            tuple(self._rewards[position] for position in chosen),
            scores.parts,
            metrics,
            count_tokens(self._groups.values()),
            replaced,
        )

    def _zero_advantage(self) -> list[int]:
        for position in sorted(self._groups.keys() - self._rewards.keys()):
            rewards = self._scoring.rewards(self._numbers[position])
            if rewards is not None:
                group = self._groups[position]
                self._rewards[position] = with_penalties(self._settings, rewards, group)
        return sorted(pos for pos, rewards in self._rewards.items() if not rewards_differ(rewards))


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


def new_groups(run: Run, first: int, count: int) -> list[Group]:
    prompts = prompts_from(run.setup.train, first, count, run.config.seed)
    return [Group.begun(prompt, run.config.rollout.samples_per_prompt) for prompt in prompts]


def finished_counter(run: Run) -> Callable[[int], object]:
    settings = run.config.rollout
    total = settings.prompts_per_step * settings.samples_per_prompt
    return run.log.response_counter("rollout", total)


def with_penalties(settings: RolloutConfig, rewards: Rewards, group: Group) -> Rewards:
    """With `truncated = "penalty"` a truncated response has the lowest reward of the group, or 0 if
    that is lower. The last `overlong_tokens` lower a reward linearly by up to `overlong_penalty`
    (DAPO's soft overlong punishment, arXiv:2503.14476, equation 13)."""
    lowest = min([0.0, *known_rewards(rewards).tolist()])

    def penalised(reward: float | None, rollout: Rollout) -> float | None:
        if settings.truncated == "penalty" and rollout.truncated:
            reward = lowest
        if reward is None or not settings.overlong_tokens:
            return reward
        beyond = len(rollout.response_ids) - settings.max_new_tokens + settings.overlong_tokens
        share = min(max(beyond / settings.overlong_tokens, 0.0), 1.0)
        return reward - settings.overlong_penalty * share

    return tuple(
        penalised(reward, rollout) for reward, rollout in zip(rewards, group.rollouts, strict=True)
    )


def count_tokens(groups: Iterable[Group]) -> int:
    return sum(group.tokens for group in groups)


def collect_partial(run: Run, first: int, step: int, clock: Clock) -> Collected:
    """As `collect`, of groups carried over and new ones; only trained ones are scored."""
    settings, carried = run.config.rollout, run.state.carried
    count = settings.prompts_per_step
    groups = dict(enumerate(_carried_and_new(run, first)))
    due = {
        position
        for position, group in groups.items()
        if step - _oldest(group, step) >= settings.max_staleness
    }
    with run.reward_workers.scoring() as scoring:
        numbers: dict[int, int] = {}

        def take(position: int, group: Group) -> None:
            groups[position] = group
            # The step keeps room for the groups that are due.
            if group.finished and len(due | numbers.keys() | {position}) <= count:
                numbers[position] = scoring.add(group)

        def should_stop() -> bool:
            return len(numbers) == count

        for position, group in tuple(groups.items()):
            take(position, group)
        with clock("rollout"):
            unfinished = [position for position, group in groups.items() if not group.finished]
            begun = [groups[position] for position in unfinished]
            callbacks = Callbacks(finished_counter(run), should_stop=should_stop)
            for index, group in run.stream(begun, callbacks):
                take(unfinished[index], group)
        chosen = sorted(numbers)
        with clock("reward"):
            scores = scoring.scores([numbers[position] for position in chosen])
    trained = [groups[position] for position in chosen]
    left = tuple(group for position, group in groups.items() if position not in chosen)
    return Collected(
        trained,
        tuple(map(partial(with_penalties, settings), scores.rewards, trained)),
        scores.parts,
        scores.metrics() | _partial_metrics(trained, left, step),
        count_tokens(trained) + count_tokens(left) - count_tokens(carried),
        carried=left,
    )


def _carried_and_new(run: Run, first: int) -> list[Group]:
    settings, carried = run.config.rollout, run.state.carried
    # Decimal, as 50 times 1.1 is above 55 in floats.
    most = ceil(settings.prompts_per_step * Decimal(repr(settings.oversubscribe)))
    new = new_groups(run, first + len(carried), most - len(carried))
    # A resumed run may have a lower `max_new_tokens` than when these were sampled.
    return [*(group.cut(settings.max_new_tokens) for group in carried), *new]


def _partial_metrics(
    trained: Sequence[Group], left: Sequence[Group], step: int
) -> dict[str, float]:
    segments = [one for group in trained for rollout in group.rollouts for one in rollout.segments]
    stale = sum(one.end - one.start for one in segments if int(one.weight_version) < step)
    return {
        "sparrow/carried_groups": float(len(left)),
        "sparrow/carried_tokens": float(count_tokens(left)),
        "sparrow/stale_token_fraction": stale / count_tokens(trained),
        "sparrow/staleness_max": float(max(step - _oldest(group, step) for group in trained)),
    }


def _oldest(group: Group, step: int) -> int:
    """The step whose weights sampled the group's oldest tokens; `step` if it has no tokens."""
    segments = [one for rollout in group.rollouts for one in rollout.segments]
    return min((int(one.weight_version) for one in segments), default=step)
