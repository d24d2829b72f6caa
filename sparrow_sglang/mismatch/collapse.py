"""Whether a run collapses: its entropy and its reward fall while its tail percentile rises. Sparse
and dense decode agree on a policy that repeats itself. Its tail percentile rises to 1 and looks
healthy, although its falling entropy shows that it is not. A policy that learns its task becomes
surer, too, and its tail rises as well; its reward tells it apart."""

from collections.abc import Mapping, Sequence

ENTROPY = "actor/entropy"
REWARD = "critic/score/mean"
TAIL = "sparrow/accept_p05"
ALARM = "sparrow/collapse_alarm"

WINDOW = 5
"""Steps at the beginning of a run, and the latest ones, whose means are compared."""
FALL = 0.5
"""The entropy has fallen when it is below this share of its value at the beginning. Chosen on three
collapsed runs under 64 tokens and nine others of an earlier study, with the sampled estimate
rollout_corr/training_log_ppl in the entropy's place. None of the 31 sparse runs of the lookup study
(docs/results.md) raises the alarm; without the condition on the reward 18 would."""


def collapse_alarm(rows: Sequence[Mapping[str, float]]) -> bool | None:
    """Whether the last of a run's rows, in order from its first, shows a collapse. It does if the
    mean entropy of the latest `WINDOW` steps is below `FALL` times that of the first `WINDOW`
    steps, their mean tail percentile above that of the first ones, and their mean reward below it.
    Rows without these metrics are left out. None before there are two windows."""
    known = [row for row in rows if ENTROPY in row and TAIL in row and REWARD in row]
    if len(known) < 2 * WINDOW:
        return None

    def mean(name: str, window: Sequence[Mapping[str, float]]) -> float:
        return sum(row[name] for row in window) / len(window)

    first, latest = known[:WINDOW], known[-WINDOW:]
    return (
        mean(ENTROPY, latest) < FALL * mean(ENTROPY, first)
        and mean(TAIL, latest) > mean(TAIL, first)
        and mean(REWARD, latest) < mean(REWARD, first)
    )
