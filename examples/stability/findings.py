"""What happened in the runs: numbers per arm, and what they mean in words.

In: the metrics of each run. Out: `ArmSummary`s and sentences. All of it follows from the numbers
by the rules written here, whatever they say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import hypot
from statistics import fmean, median

REWARD = "critic/score/mean"
PASS_RATE = "eval/pass_rate"
LENGTH = "response_length/mean"
TAIL = "sparrow/accept_p05"
TAIL_OF_BIN = "sparrow/accept_p05_bin"
KL = "rollout_corr/kl"
DISTILL_KL = "sparrow/distill_kl"
PAPER_TAIL = 0.86
# Standard errors by which two pass rates must differ to be told apart.
CLEAR = 2.0
# Shares of a run's steps over which a tail is averaged before the lowest one is sought.
PARTS = 10
# A run has collapsed if its last pass rate is below this share of its best one.
COLLAPSED_BELOW = 0.5
# A run is steady if the reward of its rollouts never falls by more than this share of its running
# best.
STEADY_FALL = 1 / 3

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class RunSummary:
    """One run: held-out pass rates with standard errors, what became of it, and how steadily.

    `outcome` is "collapsed" if the last pass rate is clearly below the best one, and below half of
    it; "learnt" or "lost" if it is clearly above or below the first; "unchanged" otherwise. It
    looks at the two ends of a run; the falls look at what lies between. `reward_fall` is the
    largest fall of the reward of rollouts below its running best, as a share of that best;
    `pass_fall` the largest clear fall of the held-out pass rate, as (running best, later).
    """

    first: float
    best: float
    last: float
    last_stderr: float
    outcome: str
    reward_fall: float
    pass_fall: tuple[float, float] | None

    @property
    def steady(self) -> bool:
        return self.reward_fall <= STEADY_FALL


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds: means of runs; tails and KL are medians over the runs' steps.

    Tails are by position bin, and empty for dense rollouts. `lowest_tails` are those of the worst
    tenth of a run's steps, in the worst run: what the paper's rule is about is the whole way, and a
    policy that has collapsed repeats itself, on which sparse and dense decode agree. Rewards,
    lengths and the divergence that the adapter is trained on (None without one) are means over the
    first and the last tenth of the steps.
    """

    arm: str
    runs: tuple[RunSummary, ...]
    rewards: tuple[float, float]
    lengths: tuple[float, float]
    tails: Mapping[int, float]
    lowest_tails: Mapping[int, float]
    kl: float
    distill_kl: tuple[float, float] | None

    @property
    def first(self) -> float:
        return fmean(run.first for run in self.runs)

    @property
    def last(self) -> float:
        return fmean(run.last for run in self.runs)

    @property
    def last_stderr(self) -> float:
        """Of `last`, as far as it comes from the held-out prompts."""
        return hypot(*(run.last_stderr for run in self.runs)) / len(self.runs)

    @property
    def mean_fall(self) -> float:
        """Mean over the runs of `reward_fall`."""
        return fmean(run.reward_fall for run in self.runs)

    def count(self, *outcomes: str) -> int:
        """Runs that ended in one of these ways."""
        return sum(run.outcome in outcomes for run in self.runs)

    def keeps_up(self, others: Sequence["ArmSummary"]) -> bool:
        """No run has collapsed or lost, and the last pass rate is not clearly below the others'."""
        ours = (self.last, self.last_stderr)
        behind = [
            other
            for other in others
            if self.last < other.last and _differ(ours, (other.last, other.last_stderr))
        ]
        return not behind and self.count("collapsed", "lost") == 0


def summarise(arm: str, runs: Sequence[Rows]) -> ArmSummary:
    """`runs` are the rows of each seed's metrics, in the order of the steps."""
    steps = [[row for row in rows if REWARD in row] for rows in runs]
    bins = sorted({int(key.removeprefix(TAIL_OF_BIN)) for key in _keys(steps, TAIL_OF_BIN)})
    return ArmSummary(
        arm,
        tuple(_run_summary(rows) for rows in runs),
        ends(steps, REWARD),
        ends(steps, LENGTH),
        {index: median(_values(steps, f"{TAIL_OF_BIN}{index}")) for index in bins},
        {index: _lowest(steps, f"{TAIL_OF_BIN}{index}") for index in bins},
        median(_values(steps, KL)),
        ends(steps, DISTILL_KL) if any(_keys(steps, DISTILL_KL)) else None,
    )


def largest_fall(values: Sequence[float]) -> float:
    """Largest fall below the running best, as a share of that best; 0 if there is none."""
    running_best = accumulate(values, max)
    return max(
        1 - value / best if best > 0 else 0.0
        for value, best in zip(values, running_best, strict=True)
    )


def sentences(summaries: Sequence[ArmSummary]) -> Iterator[str]:
    """What happened in each arm, and whether the tail told it beforehand."""
    sparse = [summary for summary in summaries if summary.tails]
    dense = [summary for summary in summaries if not summary.tails]
    for summary in summaries:
        yield _what_happened(summary)
    if not sparse:
        return
    as_good = {summary.arm: summary.keeps_up(dense) for summary in sparse}
    lowest = {summary.arm: min(summary.lowest_tails.values()) for summary in sparse}
    against = [arm for arm in as_good if (lowest[arm] >= PAPER_TAIL) != as_good[arm]]
    yield (
        f"The paper finds training stable where the tail is at least {PAPER_TAIL} in every bin all"
        " the way, and collapses below. Here the lowest tail on the way tells whether an arm keeps"
        f" up with dense rollouts in {len(sparse) - len(against)} of {len(sparse)} sparse arms."
        + ("" if max(lowest.values()) >= PAPER_TAIL else " None of them held it all the way.")
    )
    behind = [
        f"{summary.arm} ({lowest[summary.arm]:.3f})"
        for summary in sparse
        if not as_good[summary.arm] and not summary.count("collapsed", "lost")
    ]
    if behind:
        yield (
            f"Behind dense rollouts, but without a run that collapsed or lost, at lowest tails of:"
            f" {', '.join(behind)}."
        )
    for arm in against:
        side = "at or above" if lowest[arm] >= PAPER_TAIL else "below"
        then = "kept up" if as_good[arm] else "did not keep up"
        yield (
            f"Against the paper: {arm} has its lowest tail, {lowest[arm]:.3f}, {side}"
            f" {PAPER_TAIL}, and {then}."
        )


def steadiness(summaries: Sequence[ArmSummary]) -> Iterator[str]:
    """What lies between the ends of the runs: falls of reward, of pass rate, and the divergence."""
    steady = ", ".join(
        f"{summary.arm} {sum(run.steady for run in summary.runs)} of {len(summary.runs)}"
        for summary in summaries
    )
    yield (
        f"Steady runs, whose reward never fell by more than {STEADY_FALL:.0%} of its running best:"
        f" {steady}."
    )
    falls = [
        f"{summary.arm} from {run.pass_fall[0]:.3f} to {run.pass_fall[1]:.3f}"
        for summary in summaries
        for run in summary.runs
        if run.pass_fall
    ]
    if falls:
        yield f"Runs whose held-out pass rate fell clearly on the way: {', '.join(falls)}."
    sparse = sorted((s for s in summaries if s.tails), key=lambda summary: summary.mean_fall)
    if len(sparse) > 1:
        means = ", ".join(f"{summary.arm} ({summary.mean_fall:.0%})" for summary in sparse)
        yield f"Sparse arms, the steadiest first, by the mean of the runs' largest falls: {means}."
    for summary in summaries:
        if summary.distill_kl:
            first, last = summary.distill_kl
            yield (
                f"{summary.arm}: the divergence that the adapter is trained on went from"
                f" {first:.3f} to {last:.3f}."
            )


def _what_happened(summary: ArmSummary) -> str:
    kinds = ("learnt", "unchanged", "lost", "collapsed")
    outcomes = ", ".join(f"{summary.count(kind)} {kind}" for kind in kinds if summary.count(kind))
    tails = ", ".join(
        f"{summary.lowest_tails[index]:.3f} and {tail:.3f} in bin {index}"
        for index, tail in summary.tails.items()
    )
    measured = f"tail, lowest and median, {tails}" if tails else "dense rollouts, no tail"
    return (
        f"{summary.arm}: the pass rate went from {summary.first:.3f} to {summary.last:.3f}"
        f" ({outcomes}), the reward of its rollouts from {summary.rewards[0]:.3f} to"
        f" {summary.rewards[1]:.3f}, their length from {summary.lengths[0]:.0f} to"
        f" {summary.lengths[1]:.0f} tokens; {measured}, KL to the dense policy {summary.kl:.2g}."
    )


def _run_summary(rows: Rows) -> RunSummary:
    points = [(row[PASS_RATE], row[f"{PASS_RATE}_stderr"]) for row in rows if PASS_RATE in row]
    first, best, last = points[0], max(points), points[-1]
    if last[0] < COLLAPSED_BELOW * best[0] and _differ(last, best):
        outcome = "collapsed"
    elif _differ(last, first):
        outcome = "learnt" if last[0] > first[0] else "lost"
    else:
        outcome = "unchanged"
    rewards = [row[REWARD] for row in rows if REWARD in row]
    fall = largest_fall(rewards)
    return RunSummary(first[0], best[0], *last, outcome, fall, _pass_fall(points))


def _pass_fall(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Largest clear fall of (pass rate, standard error) below the running best."""
    pairs = zip(accumulate(points, max), points, strict=True)
    falls = [(best[0], later[0]) for best, later in pairs if _differ(best, later)]
    return max(falls, key=lambda pair: pair[0] - pair[1], default=None)


def _differ(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) > CLEAR * hypot(one[1], other[1])


def _keys(runs: Sequence[Rows], prefix: str) -> Iterator[str]:
    yield from (key for rows in runs for row in rows for key in row if key.startswith(prefix))


def _values(runs: Sequence[Rows], key: str) -> list[float]:
    return [row[key] for rows in runs for row in rows if key in row]


def _lowest(runs: Sequence[Rows], key: str) -> float:
    """Lowest mean over a `PARTS`-th of a run's rows."""
    means = []
    for rows in runs:
        size = max(1, len(rows) // PARTS)
        parts = (rows[first : first + size] for first in range(0, len(rows) - size + 1, size))
        values = [[row[key] for row in part if key in row] for part in parts]
        means += [fmean(each) for each in values if each]
    return min(means)


def ends(runs: Sequence[Rows], key: str) -> tuple[float, float]:
    """Mean over the first and the last tenth of each run's rows, at least one row."""
    parts = [max(1, len(rows) // PARTS) for rows in runs]
    first = [rows[:part] for rows, part in zip(runs, parts, strict=True)]
    last = [rows[-part:] for rows, part in zip(runs, parts, strict=True)]
    return fmean(_values(first, key)), fmean(_values(last, key))
