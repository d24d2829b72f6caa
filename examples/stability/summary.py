"""The runs of a study in one table.

In: the metrics of each run. Out: summary.md, a row for each arm. `sparrow report` draws the same
folder's learning curves.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import hypot
from pathlib import Path
from statistics import fmean, median

REWARD = "critic/score/mean"
PASS_RATE = "eval/pass_rate"
LENGTH = "response_length/mean"
KL = "rollout_corr/kl"
TAIL_OF_BIN = "sparrow/accept_p05_bin"
# Standard errors by which two pass rates must differ to be told apart.
CLEAR = 2.0
# Shares of a run's steps over which a tail is averaged before the lowest one is sought.
PARTS = 10
# A run has collapsed if its last pass rate is below this share of its best one.
COLLAPSED_BELOW = 0.5

Rows = Sequence[Mapping[str, float]]


def write_summary(results: Path, arms: Mapping[str, Sequence[Path]]) -> None:
    """Write summary.md into `results`; `arms` are metrics files by arm."""
    metrics = {
        arm: [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in paths]
        for arm, paths in arms.items()
    }
    rows = [arm_cells(arm, runs) for arm, runs in metrics.items()]
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    lines = [[*rows[0]], rule, *([*row.values()] for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (results / "summary.md").write_text(table, "utf-8")


def arm_cells(arm: str, runs: Sequence[Rows]) -> dict[str, str]:
    """One row of the table; `runs` are the metrics of each seed, in the order of the steps.

    Tails are by position bin, and empty for dense rollouts: the lowest ones of the worst tenth of a
    run's steps, in the worst run, and medians over all steps. The paper's rule is about the whole
    way, and a policy that has collapsed repeats itself, on which sparse and dense decode agree.
    """
    rates = [pass_rates(rows) for rows in runs]
    steps = [[row for row in rows if REWARD in row] for rows in runs]
    bins = _bins(steps)
    return {
        "arm": arm,
        "pass rate, first": f"{fmean(rate[0][0] for rate in rates):.3f}",
        "last, by seed": ", ".join(f"{rate[-1][0]:.3f}" for rate in rates),
        "runs": ", ".join(outcome(rate) for rate in rates),
        "reward, first → last": "{:.3f} → {:.3f}".format(*ends(steps, REWARD)),
        "largest fall, by seed": ", ".join(
            f"{largest_fall([row[REWARD] for row in rows]):.0%}" for rows in steps
        ),
        "length, first → last": "{:.0f} → {:.0f}".format(*ends(steps, LENGTH)),
        "lowest tail by bin": ", ".join(f"{lowest(steps, key):.3f}" for key in bins) or "–",
        "median": ", ".join(f"{median(_values(steps, key)):.3f}" for key in bins) or "–",
        "median KL": f"{median(_values(steps, KL)):.2g}",
    }


def pass_rates(rows: Rows) -> list[tuple[float, float]]:
    """(held-out pass rate, its standard error) of each evaluation."""
    return [(row[PASS_RATE], row[f"{PASS_RATE}_stderr"]) for row in rows if PASS_RATE in row]


def outcome(rates: Sequence[tuple[float, float]]) -> str:
    """What became of a run, by the ends of its pass rates.

    "collapsed" if the last one is clearly below the best one, and below half of it; "learnt" or
    "lost" if it is clearly above or below the first; "unchanged" otherwise.
    """
    first, best, last = rates[0], max(rates), rates[-1]
    if last[0] < COLLAPSED_BELOW * best[0] and differ(last, best):
        return "collapsed"
    if differ(last, first):
        return "learnt" if last[0] > first[0] else "lost"
    return "unchanged"


def differ(rate: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two pass rates differ by more than `CLEAR` standard errors."""
    return abs(rate[0] - other[0]) > CLEAR * hypot(rate[1], other[1])


def largest_fall(values: Sequence[float]) -> float:
    """Largest fall below the running best, as a share of that best; 0 if there is none."""
    running_best = accumulate(values, max)
    return max(
        1 - value / best if best > 0 else 0.0
        for value, best in zip(values, running_best, strict=True)
    )


def lowest(runs: Sequence[Rows], key: str) -> float:
    """Lowest mean over a `PARTS`-th of a run's rows."""
    means = []
    for rows in runs:
        size = max(1, len(rows) // PARTS)
        for first in range(0, len(rows) - size + 1, size):
            values = _values([rows[first : first + size]], key)
            means += [fmean(values)] if values else []
    return min(means)


def ends(runs: Sequence[Rows], key: str) -> tuple[float, float]:
    """Mean over the first and the last tenth of each run's rows, at least one row."""
    parts = [max(1, len(rows) // PARTS) for rows in runs]
    first = [rows[:part] for rows, part in zip(runs, parts, strict=True)]
    last = [rows[-part:] for rows, part in zip(runs, parts, strict=True)]
    return fmean(_values(first, key)), fmean(_values(last, key))


def _bins(runs: Sequence[Rows]) -> list[str]:
    keys = {key for rows in runs for row in rows for key in row if key.startswith(TAIL_OF_BIN)}
    return sorted(keys, key=lambda key: int(key.removeprefix(TAIL_OF_BIN)))


def _values(runs: Sequence[Rows], key: str) -> list[float]:
    return [row[key] for rows in runs for row in rows if key in row]
