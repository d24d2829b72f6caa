"""Partial rollouts: groups that finish first, and those that would be too stale in the next step,
in which unfinished ones go on (Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521)."""

from collections.abc import Sequence
from functools import partial

from sparrow_sglang.rl.collect import (
    Collected,
    begin,
    count_finished,
    count_tokens,
    groups_under_way,
    with_penalties,
)
from sparrow_sglang.rl.runs.log import Clock
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.types import Group


def collect(run: Run, first: int, step: int, clock: Clock) -> Collected:
    """The groups of `step`: carried over, or new ones from the run's prompt number `first` on; only
    they are scored. The engine has released its memory afterwards."""
    settings, carried = run.config.rollout, run.state.carried
    count = settings.prompts_per_step
    groups = dict(enumerate(_under_way(run, first)))
    due = {
        position
        for position, group in groups.items()
        if step - _oldest(group, step) >= settings.max_staleness
    }
    with run.reward_workers.scoring() as scoring:
        numbers: dict[int, int] = {}

        def take(position: int, group: Group) -> None:
            groups[position] = group
            # Places in the step stay reserved for the groups that are due.
            if group.finished and len(due | numbers.keys() | {position}) <= count:
                numbers[position] = scoring.add(group)

        def should_stop() -> bool:
            return len(numbers) == count

        for position, group in tuple(groups.items()):
            take(position, group)
        with clock("rollout"):
            unfinished = [position for position, group in groups.items() if not group.finished]
            begun = [groups[position] for position in unfinished]
            for index, group in run.actor.stream(
                begun, count_finished(run), should_stop=should_stop
            ):
                take(unfinished[index], group)
            run.actor.release()
        chosen = sorted(numbers)
        with clock("reward"):
            scores = scoring.scores([numbers[position] for position in chosen])
    trained = [groups[position] for position in chosen]
    left = tuple(group for position, group in groups.items() if position not in chosen)
    return Collected(
        trained,
        tuple(map(partial(with_penalties, settings), scores.rewards, trained)),
        scores.parts,
        scores.metrics() | _metrics(trained, left, step),
        count_tokens(trained) + count_tokens(left) - count_tokens(carried),
        carried=left,
    )


def _under_way(run: Run, first: int) -> list[Group]:
    settings, carried = run.config.rollout, run.state.carried
    most = groups_under_way(settings.prompts_per_step, settings.oversubscribe)
    new = begin(run, first + len(carried), most - len(carried))
    # A resumed run may have a lower `max_new_tokens` than when these were sampled.
    return [*(group.cut(settings.max_new_tokens) for group in carried), *new]


def _metrics(trained: Sequence[Group], left: Sequence[Group], step: int) -> dict[str, float]:
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
