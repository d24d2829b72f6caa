"""Partial rollouts: the groups that finish first; the others are continued in the next step.

A step takes groups that would be too stale in the next one, whenever they finish (Kimi k1.5,
arXiv:2501.12599; APRIL, arXiv:2509.18521).
"""

from collections.abc import Sequence

from sparrow_sglang.rl.collect.base import Collected, Collector, count_tokens, with_penalties
from sparrow_sglang.rl.rollout import groups_under_way
from sparrow_sglang.rl.types import Group


def collect(collector: Collector, first: int, step: int, carried: Sequence[Group]) -> Collected:
    """The groups of `step` out of those `carried` over and new ones, from prompt `first` on.

    Only the groups that the step trains on are scored. The engine is released.
    """
    settings = collector.settings
    count = settings.prompts_per_step
    groups = dict(enumerate(_under_way(collector, first, carried)))
    due = {
        place
        for place, group in groups.items()
        if step - _oldest(group, step) >= settings.max_staleness
    }
    with collector.reward_workers.scoring() as scoring:
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
        with collector.clock("rollout"):
            asked = [place for place, group in groups.items() if not group.finished]
            begun = [groups[place] for place in asked]
            for position, group in collector.actor.stream(
                begun, collector.count_finished(), should_stop=should_stop
            ):
                take(asked[position], group)
            collector.actor.release()
        chosen = sorted(numbers)
        with collector.clock("reward"):
            scores = scoring.scores([numbers[place] for place in chosen])
    kept = [groups[place] for place in chosen]
    left = tuple(group for place, group in groups.items() if place not in chosen)
    return Collected(
        kept,
        with_penalties(settings, scores.rewards, kept),
        scores.parts,
        scores.metrics() | _metrics(kept, left, step),
        count_tokens(kept) + count_tokens(left) - count_tokens(carried),
        carried=left,
    )


def _under_way(collector: Collector, first: int, carried: Sequence[Group]) -> list[Group]:
    """The groups that were carried over, and new ones up to the limit of `groups_under_way`."""
    settings = collector.settings
    most = groups_under_way(settings.prompts_per_step, settings.oversubscribe)
    new = collector.prompts_from(first + len(carried), most - len(carried))
    # A resumed run may have a lower `max_new_tokens` than when these were sampled.
    return [*(group.cut(settings.max_new_tokens) for group in carried), *collector.begin(new)]


def _metrics(kept: Sequence[Group], left: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of the groups that `step` trains on, and of those that it carries over."""
    segments = [one for group in kept for rollout in group.rollouts for one in rollout.segments]
    stale = sum(one.end - one.start for one in segments if int(one.weight_version) < step)
    return {
        "sparrow/carried_groups": float(len(left)),
        "sparrow/carried_tokens": float(count_tokens(left)),
        "sparrow/stale_token_fraction": stale / count_tokens(kept),
        "sparrow/staleness_max": float(max(step - _oldest(group, step) for group in kept)),
    }


def _oldest(group: Group, step: int) -> int:
    """The step whose weights sampled the group's oldest tokens; `step` if it has no tokens."""
    segments = [one for rollout in group.rollouts for one in rollout.segments]
    return min((int(one.weight_version) for one in segments), default=step)
