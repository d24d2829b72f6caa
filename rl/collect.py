"""A step's groups and their rewards.

In: a run and the step's prompts. Out: `Collected`. Either all groups are sampled and then rewarded;
or each is rewarded as soon as it is complete, while others are sampled, and replaced if all of its
samples earned the same reward (dynamic sampling, DAPO, arXiv:2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.rollout import prompts_of_step
from sparrow_sglang.rl.runs.log import Clock
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.tasks.rewards import Scores, Scoring, without_truncated
from sparrow_sglang.rl.types import Group, Prompt


@dataclass(frozen=True, eq=False)
class Collected:
    """As many `groups` as the step has prompts, with `rewards` [n] float64 of each.

    Rewards of cut responses are 0 under the penalty for them. `tokens` counts all response tokens
    that were sampled, `replaced` the groups that others took the place of.
    """

    groups: list[Group]
    rewards: tuple[NDArray[np.float64], ...]
    metrics: dict[str, float]
    tokens: int
    replaced: int = 0


def collect(run: Run, prompts: Sequence[Prompt], step: int, clock: Clock) -> Collected:
    """Groups of `prompts`, the prompts of `step`; afterwards the device's memory is the
    trainer's."""
    settings = run.config.rollout
    if run.config.task.overlap_rewards or settings.dynamic_sampling > 1:
        return _collect_overlapping(run, prompts, step, clock)
    with clock("rollout"):
        samples = len(prompts) * settings.samples_per_prompt
        groups = run.actor.roll_out(prompts, run.log.responses("rollout", samples))
    with clock("reward"):
        scores = run.reward_workers.score(groups)
    return Collected(groups, _counted(run, scores, groups), scores.metrics(), _tokens(groups))


def _collect_overlapping(run: Run, prompts: Sequence[Prompt], step: int, clock: Clock) -> Collected:
    samples = run.config.rollout.samples_per_prompt
    with run.reward_workers.scoring() as scoring:
        batch = _Replacing(run, scoring, len(prompts), step)
        with clock("rollout"):
            finished = run.log.responses("rollout", len(prompts) * samples)
            asked = list(prompts)
            while asked:
                first = batch.started - len(asked)
                for position, group in run.actor.stream(asked, finished, batch.further):
                    batch.add(first + position, group)
                if not batch.replaces:
                    break
                # The last groups of a round are often the ones to be replaced.
                scoring.wait()
                asked = batch.further()
            run.actor.release()
        with clock("reward"):
            scoring.wait()
        return batch.result()


class _Replacing:
    """Groups of a step as they come, by the order in which their prompts were started.

    Each group without variance of rewards is replaced by one of the next prompt in the order of the
    data, until `dynamic_sampling` times the step's prompts have been started.
    """

    def __init__(self, run: Run, scoring: Scoring, count: int, step: int) -> None:
        self.started = count
        self._run, self._scoring, self._count = run, scoring, count
        self._limit = count * run.config.rollout.dynamic_sampling
        self._next_place = (step + 1) * count + run.progress.replaced
        self._groups: dict[int, Group] = {}
        self._numbers: dict[int, int] = {}
        self._useless: set[int] = set()
        self._judged: set[int] = set()

    @property
    def replaces(self) -> bool:
        return self._limit > self._count

    def add(self, place: int, group: Group) -> None:
        """A complete group, of the prompt that was started as number `place`."""
        self._groups[place] = group
        self._numbers[place] = self._scoring.add(group)

    def further(self) -> list[Prompt]:
        """Prompts to start instead of groups that have been scored since the last call."""
        self._judge()
        config = self._run.config
        missing = self._count + len(self._useless) - self.started
        allowed = max(0, min(missing, self._limit - self.started))
        places = range(self._next_place, self._next_place + allowed)
        self.started += allowed
        self._next_place += allowed
        return [
            prompts_of_step(self._run.setup.train, 1, place, config.seed)[0] for place in places
        ]

    def result(self) -> Collected:
        """Once all are scored: those with variance, and others where there are not enough."""
        self._judge()
        useful = [place for place in sorted(self._groups) if place not in self._useless]
        kept = sorted((useful + sorted(self._useless))[: self._count])
        groups = [self._groups[place] for place in kept]
        scores = self._scoring.scores([self._numbers[place] for place in kept])
        metrics = scores.metrics()
        replaced = self.started - self._count
        if self.replaces:
            everything = np.concatenate([self._rewards(place) for place in sorted(self._groups)])
            metrics |= {
                "sparrow/replaced_groups": float(replaced),
                "sparrow/sampled_score_mean": float(everything.mean()),
            }
        tokens = _tokens(list(self._groups.values()))
        return Collected(groups, _counted(self._run, scores, groups), metrics, tokens, replaced)

    def _judge(self) -> None:
        for place in sorted(self._groups.keys() - self._judged) if self.replaces else ():
            if self._scoring.rewards(self._numbers[place]) is None:
                continue
            self._judged.add(place)
            rewards = self._rewards(place)
            if rewards.max() == rewards.min():
                self._useless.add(place)

    def _rewards(self, place: int) -> NDArray[np.float64]:
        rewards = self._scoring.rewards(self._numbers[place])
        assert rewards is not None, f"group {place} is not scored"
        return _counted(self._run, Scores((rewards,)), [self._groups[place]])[0]


def _counted(run: Run, scores: Scores, groups: Sequence[Group]) -> tuple[NDArray[np.float64], ...]:
    """The rewards that advantages are computed from."""
    if run.config.rollout.truncated == "penalty":
        return without_truncated(scores.rewards, groups)
    return scores.rewards


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(rollout.response_ids) for group in groups for rollout in group.rollouts)
