"""The runs of a study in one table.

In: a results folder with the metrics of each run. Out: summary.md, a row for each arm. `sparrow
report` draws the same folder's learning curves.

  python examples/stability/summary.py examples/stability/results
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import hypot, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

from scipy import stats

from sparrow_sglang.errors import InputError

DENSE = "dense"
REWARD = "critic/score/mean"
PASS_RATE = "eval/pass_rate"
LENGTH = "response_length/mean"
KL = "rollout_corr/kl"
TAIL_OF_BIN = "sparrow/accept_p05_bin"
CLEAR = 2.0
"""Standard errors by which two pass rates must differ to be told apart, and a slope from 0."""
PARTS = 10
"""Shares of a run's steps over which a tail is averaged before the lowest one is sought."""
LAST_PART = 1 / 3
"""Share of a run's steps, the last ones, whose slope is judged. Of 150 steps with an evaluation
every 3 these are 17 evaluations; if each has a standard error of 0.02, that of the line's fall over
the part is 0.016."""
LEAST_FALL = 0.05
"""Fall of the pass rate over that part below which a run does not count as falling. At a pass rate
near 0 standard errors are near 0, too, so any fall is clear there; and standard errors do not cover
how much the policy itself varies from step to step."""
CONFIDENCE = 0.95
"""Confidence level of the intervals over seeds."""

Rows = Sequence[Mapping[str, float]]
Runs = Mapping[int, Rows]
"""Metrics by seed, each in the order of the steps."""


class Evaluation(NamedTuple):
    """Held-out pass rate after `step` steps, with its standard error over prompts."""

    step: int
    rate: float
    stderr: float


class Slope(NamedTuple):
    """Change of the pass rate per step, its standard error, and how many steps it spans."""

    value: float
    stderr: float
    steps: int

    @property
    def falling(self) -> bool:
        """Whether it is below 0 by `CLEAR` standard errors, and the fall at least `LEAST_FALL`."""
        return self.value < -CLEAR * self.stderr and self.value * self.steps <= -LEAST_FALL


def write_summary(results: Path) -> None:
    """Write summary.md into `results`, of the arms in settings.json that have metrics."""
    arms = load_runs(results)
    rows = [arm_cells(arm, runs, arms.get(DENSE, {})) for arm, runs in arms.items()]
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    lines = [[*rows[0]], rule, *([*row.values()] for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (results / "summary.md").write_text(table, "utf-8")


def load_runs(results: Path) -> dict[str, dict[int, Rows]]:
    """Metrics in `results` by arm, in the order of settings.json, and by seed.

    Raises `InputError` if there are none.
    """
    arms: dict[str, dict[int, Rows]] = {}
    for arm in json.loads((results / "settings.json").read_text("utf-8"))["arms"]:
        name = re.compile(re.escape(arm) + r"-seed(\d+)\.jsonl")
        files = {
            int(match[1]): path
            for path in (results / "metrics").iterdir()
            if (match := name.fullmatch(path.name))
        }
        if files:
            arms[arm] = {
                seed: [json.loads(line) for line in files[seed].read_text("utf-8").splitlines()]
                for seed in sorted(files)
            }
    if not arms:
        raise InputError(f"{results / 'metrics'}: no metrics of any arm in settings.json")
    return arms


def arm_cells(arm: str, runs: Runs, dense: Runs) -> dict[str, str]:
    """One row of the table; `dense` are the runs that those of the same seed are compared with.

    Tails are given by position bin, and are empty for dense rollouts: the mean over the worst tenth
    of a run's steps, in the worst run, and the median over all steps. The paper's rule is about the
    whole run, and a policy that has collapsed repeats itself, which makes sparse and dense decode
    agree.
    """
    rates = [evaluations(rows) for rows in runs.values()]
    steps = [[row for row in rows if REWARD in row] for rows in runs.values()]
    bins = _bins(steps)
    falling = sum(last_slope(curve).falling for curve in rates)
    compared = {} if arm == DENSE else paired_differences(runs, dense)
    means, lasts = ([pair[index] for pair in compared.values()] for index in (0, 1))
    return {
        "arm": arm,
        "pass rate, first": f"{fmean(rate[0].rate for rate in rates):.3f}",
        "last, by seed": ", ".join(f"{rate[-1].rate:.3f}" for rate in rates),
        "area to dense": with_interval(means),
        "last to dense": with_interval(lasts),
        "falling": f"{falling} of {len(rates)}",
        "reward, first → last": "{:.3f} → {:.3f}".format(*ends(steps, REWARD)),
        "largest fall, by seed": ", ".join(
            f"{largest_fall([row[REWARD] for row in rows]):.0%}" for rows in steps
        ),
        "length, first → last": "{:.0f} → {:.0f}".format(*ends(steps, LENGTH)),
        "lowest tail by bin": ", ".join(f"{lowest(steps, key):.3f}" for key in bins) or "–",
        "median": ", ".join(f"{median(_values(steps, key)):.3f}" for key in bins) or "–",
        "median KL": f"{median(_values(steps, KL)):.2g}",
    }


def evaluations(rows: Rows) -> list[Evaluation]:
    """The evaluations of a run."""
    return [
        Evaluation(int(row["step"]), row[PASS_RATE], row[f"{PASS_RATE}_stderr"])
        for row in rows
        if PASS_RATE in row
    ]


def last_slope(curve: Sequence[Evaluation]) -> Slope:
    """Least-squares slope of the pass rate over the last `LAST_PART` of a run's steps.

    b = sum (x - mean x) y / S with S = sum (x - mean x)^2. Its standard error is that of the
    evaluations carried through, sqrt(sum (x - mean x)^2 s^2) / S. At least the last two evaluations
    count; raises `ValueError` if there are fewer.
    """
    if len(curve) < 2:
        raise ValueError(f"{len(curve)} evaluations: expected 2 or more for a slope")
    first = curve[-1].step * (1 - LAST_PART)
    part = [point for point in curve if point.step >= first]
    part = part if len(part) > 1 else curve[-2:]
    centre = fmean(point.step for point in part)
    spread = sum((point.step - centre) ** 2 for point in part)
    value = sum((point.step - centre) * point.rate for point in part) / spread
    error = hypot(*((point.step - centre) * point.stderr for point in part)) / spread
    return Slope(value, error, part[-1].step - part[0].step)


def paired_differences(runs: Runs, dense: Runs) -> dict[int, tuple[float, float]]:
    """Mean and last difference of the pass rate from the dense run's, by seed that both have.

    Over the evaluations after the same steps; the mean is the area between both curves as a share
    of the run.
    """
    differences = {}
    for seed in runs.keys() & dense.keys():
        base = {point.step: point.rate for point in evaluations(dense[seed])}
        gaps = [
            point.rate - base[point.step] for point in evaluations(runs[seed]) if point.step in base
        ]
        if gaps:
            differences[seed] = (fmean(gaps), gaps[-1])
    return differences


def paired_interval(values: Sequence[float]) -> tuple[float, float]:
    """`CONFIDENCE` interval of the mean over seeds, by Student's t; there must be two or more."""
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    half = float(quantile) * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def with_interval(values: Sequence[float]) -> str:
    """Mean and interval in a cell; of one seed without an interval, of none a dash."""
    if not values:
        return "–"
    mean = f"{fmean(values):+.3f}"
    if len(values) < 2:
        return mean
    low, high = paired_interval(values)
    return f"{mean} [{low:+.3f}, {high:+.3f}]"


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


if __name__ == "__main__":
    write_summary(Path(sys.argv[1]))
