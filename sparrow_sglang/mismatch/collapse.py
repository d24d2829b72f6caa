"""Whether a run collapses: its entropy falls while its tail percentile rises.

Sparse and dense decode agree on a policy that repeats itself. Its tail percentile rises to 1 and
looks healthy, although its falling entropy shows that it is not.
"""

from collections.abc import Mapping, Sequence

ENTROPY = "actor/entropy"
TAIL = "sparrow/accept_p05"
ALARM = "sparrow/collapse_alarm"

WINDOW = 5
"""Steps at the beginning of a run, and the latest ones, whose means are compared."""
FALL = 0.5
"""The entropy has fallen when it is below this share of its value at the beginning. On the runs of
examples/stability, with the sampled estimate rollout_corr/training_log_ppl in the entropy's place,
this separates the three runs under 64 tokens, in their 10th or 11th step, from the nine others; it
was chosen on these runs."""


def collapse_alarm(rows: Sequence[Mapping[str, float]]) -> bool | None:
    """Whether the last of a run's rows, in order from its first, shows a collapse.

    It does if the mean entropy of the latest `WINDOW` steps is below `FALL` times that of the
    first `WINDOW` steps, and their mean tail percentile is above that of the first ones. Rows
    without both metrics are left out. None before there are two windows.
    """
    known = [row for row in rows if ENTROPY in row and TAIL in row]
    if len(known) < 2 * WINDOW:
        return None

    def mean(name: str, some: Sequence[Mapping[str, float]]) -> float:
        return sum(row[name] for row in some) / len(some)

    first, latest = known[:WINDOW], known[-WINDOW:]
    fallen = mean(ENTROPY, latest) < FALL * mean(ENTROPY, first)
    return fallen and mean(TAIL, latest) > mean(TAIL, first)
