"""Groups are rewarded while others are sampled, and those that teach nothing are replaced (DAPO).

A zero-advantage group, in which all samples earned the same reward, is replaced by one of the next
prompt in the order of the data (arXiv:2503.14476), while others are still being sampled.
"""

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.collect.base import Collected, Collector, count_tokens, with_penalties
from sparrow_sglang.rl.tasks.rewards import Scoring
from sparrow_sglang.rl.types import Group


def collect(collector: Collector, first: int) -> Collected:
    """Groups of the step's prompts, the run's from number `first` on; the engine is released.

    With `dynamic_sampling = 1` none is replaced, and rewards are computed during the rollout.
    """
    count = collector.settings.prompts_per_step
    with collector.reward_workers.scoring() as scoring:
        sampled = DynamicSampling(collector, scoring, first + count)
        with collector.clock("rollout"):
            begun = collector.begin(collector.prompts_from(first, count))
            for position, group in collector.actor.stream(
                begun, collector.count_finished(), sampled.more_groups
            ):
                sampled.add(position, group)
            collector.actor.release()
        with collector.clock("reward"):
            scoring.wait()
        return sampled.result()


class DynamicSampling:
    """The complete groups of a step, numbered in the order in which their prompts were started.

    Zero-advantage groups are replaced, beginning with prompt `next_number`, until
    `dynamic_sampling` times the step's prompts have been started.
    """

    def __init__(self, collector: Collector, scoring: Scoring, next_number: int) -> None:
        self._collector = collector
        self._scoring = scoring
        self._count = self._started = collector.settings.prompts_per_step
        self._limit = self._count * collector.settings.dynamic_sampling
        self._next_number = next_number
        self._groups: dict[int, Group] = {}
        self._numbers: dict[int, int] = {}
        self._zero_std: set[int] = set()
        self._marked: set[int] = set()

    @property
    def replaces(self) -> bool:
        return self._limit > self._count

    def add(self, place: int, group: Group) -> None:
        """Take a complete group, whose prompt was started as number `place`, and have it scored."""
        self._groups[place] = group
        self._numbers[place] = self._scoring.add(group)

    def more_groups(self, nothing_under_way: bool) -> list[Group]:
        """Groups to start in place of zero-advantage groups scored since the last call.

        Waits for all scores if `nothing_under_way`: the last groups are often to be replaced, too.
        """
        if not self.replaces:
            return []
        if nothing_under_way:
            self._scoring.wait()
        self._mark_zero_std()
        missing = self._count + len(self._zero_std) - self._started
        allowed = max(0, min(missing, self._limit - self._started))
        prompts = self._collector.prompts_from(self._next_number, allowed)
        self._started += allowed
        self._next_number += allowed
        return self._collector.begin(prompts)

    def result(self) -> Collected:
        """The step's groups, once all are scored; zero-advantage groups only to fill the step."""
        self._mark_zero_std()
        useful = [place for place in sorted(self._groups) if place not in self._zero_std]
        kept = sorted((useful + sorted(self._zero_std))[: self._count])
        groups = [self._groups[place] for place in kept]
        scores = self._scoring.scores([self._numbers[place] for place in kept])
        metrics = scores.metrics()
        replaced = self._started - self._count
        if self.replaces:
            everything = np.concatenate([self._rewards(place) for place in sorted(self._groups)])
            metrics |= {
                "sparrow/replaced_groups": float(replaced),
                "sparrow/sampled_score_mean": float(everything.mean()),
            }
        tokens = count_tokens(list(self._groups.values()))
        rewards = with_penalties(self._collector.settings, scores.rewards, groups)
        return Collected(groups, rewards, scores.parts, metrics, tokens, replaced)

    def _mark_zero_std(self) -> None:
        for place in sorted(self._groups.keys() - self._marked) if self.replaces else ():
            if self._scoring.rewards(self._numbers[place]) is None:
                continue
            self._marked.add(place)
            rewards = self._rewards(place)
            if rewards.max() == rewards.min():
                self._zero_std.add(place)

    def _rewards(self, place: int) -> NDArray[np.float64]:
        rewards = self._scoring.rewards(self._numbers[place])
        assert rewards is not None, f"group {place} is not scored"
        return with_penalties(self._collector.settings, [rewards], [self._groups[place]])[0]
