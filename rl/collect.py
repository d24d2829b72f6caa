"""A step's groups and their rewards.

In: a run. Out: `Collected`, for the step's prompts. There are three ways to collect groups. All are
sampled and then rewarded. Or each is rewarded as soon as it is complete, while others are sampled,
and replaced if all of its samples earned the same reward (dynamic sampling, DAPO,
arXiv:2503.14476). Or more groups are under way than the step needs, and those that the step does
not wait for are carried over to the next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.rollout import groups_under_way, prompts_from
from sparrow_sglang.rl.runs.log import Clock
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.tasks.rewards import Scores, Scoring, without_truncated
from sparrow_sglang.rl.types import Group, Prompt


@dataclass(frozen=True, eq=False)
class Collected:
    """As many `groups` as the step has prompts, with `rewards` [n] float64 and sub-scores of each.

    With `truncated = "penalty"`, truncated responses have reward 0. `tokens` counts all response
    tokens that were sampled, `replaced` the groups that were replaced by others. The groups
    `carried` are continued in the next step.
    """

    groups: list[Group]
    rewards: tuple[NDArray[np.float64], ...]
    parts: tuple[tuple[Mapping[str, float], ...], ...]
    metrics: dict[str, float]
    tokens: int
    replaced: int = 0
    carried: tuple[Group, ...] = ()


def collect(run: Run, step: int, clock: Clock) -> Collected:
    """The groups of `step`; afterwards the engine has released the device's memory."""
    settings = run.config.rollout
    if settings.oversubscribe > 1:
        return _collect_first_finished(run, step, clock)
    first, count = _first_number(run, step), settings.prompts_per_step
    prompts = _prompts_from(run, first, count)
    if run.config.task.overlap_rewards or settings.dynamic_sampling > 1:
        return _collect_overlapping(run, prompts, first + count, clock)
    with clock("rollout"):
        samples = len(prompts) * settings.samples_per_prompt
        groups = run.actor.roll_out(prompts, run.log.responses("rollout", samples))
    with clock("reward"):
        scores = run.reward_workers.score(groups)
    rewards = _counted(run, scores, groups)
    return Collected(groups, rewards, scores.parts, scores.metrics(), _tokens(groups))


def _collect_overlapping(
    run: Run, prompts: Sequence[Prompt], next_number: int, clock: Clock
) -> Collected:
    """Groups of `prompts`; prompts from number `next_number` on replace zero-advantage groups."""
    samples = run.config.rollout.samples_per_prompt
    with run.reward_workers.scoring() as scoring:
        batch = _Replacing(run, scoring, len(prompts), next_number)
        with clock("rollout"):
            finished = run.log.responses("rollout", len(prompts) * samples)
            asked = _begun(run, prompts)
            for position, group in run.actor.stream(asked, finished, batch.more_groups):
                batch.add(position, group)
            run.actor.release()
        with clock("reward"):
            scoring.wait()
        return batch.result()


class _Replacing:
    """The complete groups of a step, numbered in the order in which their prompts were started.

    Each zero-advantage group is replaced by one of the next prompt in the order of the data, until
    `dynamic_sampling` times the step's prompts have been started.
    """

    def __init__(self, run: Run, scoring: Scoring, count: int, next_number: int) -> None:
        self.started = count
        self._run, self._scoring, self._count = run, scoring, count
        self._limit = count * run.config.rollout.dynamic_sampling
        self._next_number = next_number
        self._groups: dict[int, Group] = {}
        self._numbers: dict[int, int] = {}
        self._useless: set[int] = set()
        self._judged: set[int] = set()

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
        self._judge()
        missing = self._count + len(self._useless) - self.started
        allowed = max(0, min(missing, self._limit - self.started))
        prompts = _prompts_from(self._run, self._next_number, allowed)
        self.started += allowed
        self._next_number += allowed
        return _begun(self._run, prompts)

    def result(self) -> Collected:
        """The step's groups, once all are scored; zero-advantage groups only to fill the step."""
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
        rewards = _counted(self._run, scores, groups)
        return Collected(groups, rewards, scores.parts, metrics, tokens, replaced)

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


def _collect_first_finished(run: Run, step: int, clock: Clock) -> Collected:
    """The groups that finish first, and those that would be too stale in the next step.

    Only these are scored. Any other group that finishes meanwhile is carried over, and scored in
    the step that trains on it.
    """
    settings = run.config.rollout
    count = settings.prompts_per_step
    groups = dict(enumerate(_under_way(run, step)))
    due = {
        place
        for place, group in groups.items()
        if step - _oldest(group, step) >= settings.max_staleness
    }
    with run.reward_workers.scoring() as scoring:
        numbers: dict[int, int] = {}

        def take(place: int, group: Group) -> None:
            groups[place] = group
            # Places in the step stay reserved for the groups that are due.
            if group.finished and len(due | numbers.keys() | {place}) <= count:
                numbers[place] = scoring.add(group)

        def should_stop() -> bool:
            return len(numbers) == count

        for place, group in tuple(groups.items()):
            take(place, group)
        with clock("rollout"):
            finished = run.log.responses("rollout", count * settings.samples_per_prompt)
            asked = [place for place, group in groups.items() if not group.finished]
            begun = [groups[place] for place in asked]
            for position, group in run.actor.stream(begun, finished, should_stop=should_stop):
                take(asked[position], group)
            run.actor.release()
        chosen = sorted(numbers)
        with clock("reward"):
            scores = scoring.scores([numbers[place] for place in chosen])
    kept = [groups[place] for place in chosen]
    left = tuple(group for place, group in groups.items() if place not in chosen)
    return Collected(
        kept,
        _counted(run, scores, kept),
        scores.parts,
        scores.metrics() | _carried_metrics(kept, left, step),
        _tokens(kept) + _tokens(left) - _tokens(run.progress.carried),
        carried=left,
    )


def _under_way(run: Run, step: int) -> list[Group]:
    """The groups that were carried over, and new ones up to the limit of `groups_under_way`."""
    settings = run.config.rollout
    # A resumed run may have a lower `max_new_tokens` than when these were sampled.
    carried = [group.cut(settings.max_new_tokens) for group in run.progress.carried]
    most = groups_under_way(settings.prompts_per_step, settings.oversubscribe)
    first = _first_number(run, step) + len(carried)
    return [*carried, *_begun(run, _prompts_from(run, first, most - len(carried)))]


def _first_number(run: Run, step: int) -> int:
    """How many prompts the run has used in the steps before `step`."""
    return step * run.config.rollout.prompts_per_step + run.progress.replaced


def _prompts_from(run: Run, first: int, count: int) -> list[Prompt]:
    return prompts_from(run.setup.train, first, count, run.config.seed)


def _begun(run: Run, prompts: Sequence[Prompt]) -> list[Group]:
    return [Group.begun(one, run.config.rollout.samples_per_prompt) for one in prompts]


def _carried_metrics(kept: Sequence[Group], left: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of the groups that `step` trains on, and of those that it carries over."""
    segments = [one for group in kept for rollout in group.rollouts for one in rollout.segments]
    stale = sum(one.end - one.start for one in segments if int(one.weight_version) < step)
    return {
        "sparrow/carried_groups": float(len(left)),
        "sparrow/carried_tokens": float(_tokens(left)),
        "sparrow/stale_token_fraction": stale / _tokens(kept),
        "sparrow/staleness_max": float(max(step - _oldest(group, step) for group in kept)),
    }


def _oldest(group: Group, step: int) -> int:
    """The step whose weights sampled the group's oldest tokens; `step` if it has no tokens."""
    segments = [one for rollout in group.rollouts for one in rollout.segments]
    return min((int(one.weight_version) for one in segments), default=step)


def _counted(run: Run, scores: Scores, groups: Sequence[Group]) -> tuple[NDArray[np.float64], ...]:
    """The rewards that advantages are computed from, with the penalty for truncation if set."""
    if run.config.rollout.truncated == "penalty":
        return without_truncated(scores.rewards, groups)
    return scores.rewards


def _tokens(groups: Sequence[Group]) -> int:
    return sum(group.tokens for group in groups)
