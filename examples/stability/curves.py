"""The study's learning curves in one figure.

In: a results folder with the metrics of each run. Out: curves.svg in it: held-out pass rate and
tail against steps, means over the seeds of each arm with a band from the lowest to the highest run.

  python examples/stability/curves.py examples/stability/results
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from summary import DENSE, Runs, evaluations, load_runs

TAIL = "sparrow/accept_p05"
TARGET = 0.86
SMOOTH = 5
"""Steps over which a tail is averaged."""
OTHER_CORRECTIONS = ("none", "mask", "sequence")


def draw(results: Path) -> None:
    """Write curves.svg into `results`."""
    arms = load_runs(results)
    schedules = [arm for arm in arms if not arm.endswith(OTHER_CORRECTIONS)]
    compared = [arm for arm in arms if arm not in schedules]
    base = compared[0].rpartition("-")[0] if compared else DENSE
    # Equal files for equal results.
    with matplotlib.rc_context({"svg.hashsalt": "sparrow", "font.size": 9}):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        rates, tails, corrections = figure.subplots(1, 3)
        palette = [*matplotlib.color_sequences["tab10"], "black", "gold"]
        colours = dict(zip(arms, itertools.cycle(palette), strict=False))
        for arm in schedules:
            _plot(rates, arm, pass_rates(arms[arm]), colours[arm])
            if arm != DENSE:
                _plot(tails, arm, smoothed_tails(arms[arm]), colours[arm])
        for arm in (DENSE, base, *compared):
            if arm in arms:
                _plot(corrections, arm, pass_rates(arms[arm]), colours[arm])
        tails.axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
        for axes, title in (
            (rates, "Pass rate, by schedule"),
            (tails, "Tail of the acceptance rate"),
            (corrections, f"Pass rate under {base}, by correction"),
        ):
            axes.set_title(title, loc="left")
            axes.set_xlabel("step", loc="left")
            axes.set_ylim(0, 1)
            axes.legend(fontsize=7, frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(results / "curves.svg", metadata={"Date": None})


def pass_rates(runs: Runs) -> list[list[tuple[int, float]]]:
    """(step, pass rate) of each run."""
    return [[(point.step, point.rate) for point in evaluations(rows)] for rows in runs.values()]


def smoothed_tails(runs: Runs) -> list[list[tuple[int, float]]]:
    """(last step, mean tail) of each `SMOOTH` steps of each run."""
    curves = []
    for rows in runs.values():
        tails = [row[TAIL] for row in rows if TAIL in row]
        ends = range(SMOOTH, len(tails) + 1, SMOOTH)
        curves.append([(end, fmean(tails[end - SMOOTH : end])) for end in ends])
    return curves


def _plot(axes: Any, arm: str, curves: Sequence[Sequence[tuple[int, float]]], colour: Any) -> None:
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
    values = [[value for step, value in curve if step in steps] for curve in curves]
    at_step = [*zip(*values, strict=True)]
    axes.plot(steps, [fmean(of) for of in at_step], label=f"{arm} ({len(curves)})", color=colour)
    axes.fill_between(steps, [*map(min, at_step)], [*map(max, at_step)], color=colour, alpha=0.15)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
