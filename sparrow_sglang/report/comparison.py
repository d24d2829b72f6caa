"""Section of several runs: each quantity by step and at the end, by arm, over the seeds of an arm.

In: runs with an arm and a seed. Out: a chart and a row of the table per quantity, with 95 %
intervals that treat seeds as independent (Student's t).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from sparrow_sglang.report.charts import PALETTE, Chart, Line
from sparrow_sglang.report.page import Figure, ReportError, Section, Settings, Table, flat, number
from sparrow_sglang.report.run_files import Row, RunFiles, read_run

_REWARD, _PASS_RATE = "critic/score/mean", "eval/pass_rate"
_GAP = f"{_REWARD} - {_PASS_RATE}"
_QUANTITIES = {
    _PASS_RATE: "held-out pass rate",
    _REWARD: "reward",
    _GAP: "reward less held-out pass rate",
    "sparrow/zero_std_fraction": "groups with equal rewards",
    "response_length/mean": "response length, tokens",
    "actor/entropy": "entropy of the dense policy at the rollouts' tokens, nats",
    "sparrow/entropy_gap": "entropy of the sparse actor less the policy's, nats",
    "sparrow/distill_entropy_gap": "the same where the adapter learns, before its step",
    "sparrow/accept_p05": "tail of the acceptance rate",
    "sparrow/kv_tokens_read": "KV tokens read",
    "sparrow/distill_scale": "scale of the adapter",
    "sparrow/distill_p05_scale0": "tail without the adapter",
    "sparrow/distill_p05_scale1": "tail with the adapter at scale 1",
    "rollout_corr/k3_kl": "KL of the rollout to the dense policy",
    "sparrow/rollout_tokens_per_s": "rollout, tokens/s",
    "timing_s/step": "seconds per step",
}
# Settings that differ between runs of one arm.
_OF_A_RUN = ("run_dir", "seed", "logging.", "checkpoint.")
_OFF = "off"
_MADE_BY = ("device", "python", "packages", "commit")
_END = 0.2
_SPANS = {"at the end": "at_the_end", "over the run": "over_the_run"}
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeededRun:
    """One run: the rows of its metrics, by step, and where its newest start was made."""

    arm: str
    seed: int
    rows: Sequence[Row]
    made_by: Mapping[str, Any]

    def curve(self, metric: str) -> dict[int, float]:
        """The metric by step. The gap is that of one policy: a step evaluates before it samples."""
        if metric == _GAP:
            rewards, rates = self.curve(_REWARD), self.curve(_PASS_RATE)
            return {step: rewards[step] - rates[step] for step in rates if step in rewards}
        return {int(row["step"]): row[metric] for row in self.rows if metric in row}

    def at_the_end(self, metric: str) -> float | None:
        """Mean over the last fifth of the steps that have the metric."""
        values = list(self.curve(metric).values())
        return mean(values[-max(1, round(len(values) * _END)) :]) if values else None

    def over_the_run(self, metric: str) -> float | None:
        """Mean over all steps that have the metric."""
        values = self.curve(metric).values()
        return mean(values) if values else None


@dataclass(frozen=True)
class Interval:
    """A mean or a difference of means, and half the width of its interval, None of one seed."""

    value: float
    half: float | None

    def __str__(self) -> str:
        spread = "" if self.half is None else f" ± {number(self.half, 2)}"
        return f"{number(self.value, 3)}{spread}"


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values with its 95 % interval."""
    if len(values) < 2:
        return Interval(values[0], None)
    error = stdev(values) / sqrt(len(values))
    return Interval(mean(values), _quantile(len(values) - 1) * error)


def difference_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Difference of two means with its 95 % interval, by Welch's approximation."""
    value = mean(values) - mean(others)
    if min(len(values), len(others)) < 2:
        return Interval(value, None)
    parts = [(stdev(each) ** 2 / len(each), len(each) - 1) for each in (values, others)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Interval(value, 0.0)
    freedom = variance**2 / sum(part**2 / rest for part, rest in parts)
    return Interval(value, _quantile(freedom) * sqrt(variance))


def _quantile(freedom: float) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom))


def runs_of(folders: Sequence[Path], left_out: list[str]) -> list[SeededRun]:
    """The runs in these folders; an arm is named by the settings in which the runs differ.

    `left_out` notes runs without a step or with a damaged file, with the reason, and the steps that
    not all runs have taken.
    """
    found: dict[Path, RunFiles] = {}
    for folder in folders:
        try:
            found[folder] = read_run(folder)
        except ReportError as error:
            left_out.append(str(error))
    settings = {folder: _compared(run.config) for folder, run in found.items()}
    names = {name for values in settings.values() for name in values}
    differing = sorted(n for n in names if len({v.get(n) for v in settings.values()} - {_OFF}) > 1)

    def arm(folder: Path, run: RunFiles) -> str:
        if not run.config:
            return folder.name
        own = settings[folder]
        named = ((name, own.get(name, "–")) for name in differing)
        return ", ".join(f"{name}={value}" for name, value in named if value != _OFF) or "all"

    ends = {folder: int(run.rows[-1]["step"]) for folder, run in found.items()}
    end = min(ends.values(), default=0)
    if any(own > end for own in ends.values()):
        shortest = next(folder for folder, own in ends.items() if own == end)
        left_out.append(f"steps after {end}, the last one of {shortest}, from the comparison")
    return [
        SeededRun(
            arm(folder, run),
            int(run.config.get("seed", 0)),
            [row for row in run.rows if row["step"] <= end],
            run.starts[-1] if run.starts else {},
        )
        for folder, run in found.items()
    ]


def _compared(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings by name; those of a part that is switched off are all alike."""
    values = flat(config)
    switches = {name for name in values if name.endswith(".enabled")}
    off = tuple(name.removesuffix("enabled") for name in switches if values[name] == "False")
    return {
        name: _OFF if name.startswith(off) and name not in switches else value
        for name, value in values.items()
        if not name.startswith(_OF_A_RUN)
    }


def _shared_settings(runs: Sequence[SeededRun]) -> dict[str, str]:
    first, *others = [_compared(run.made_by.get("config", {})) for run in runs]
    shared = {name: v for name, v in first.items() if all(o.get(name) == v for o in others)}
    return {name: v for name, v in shared.items() if v != _OFF}


def comparison_section(runs: Sequence[SeededRun], title: str) -> Section:
    """Curves and final values of the arms, and what each differs from the first one.

    Raises `ReportError` if the runs have no quantity in common that is compared.
    """
    by_arm = _by_arm(runs)
    metrics = [metric for metric in _QUANTITIES if any(run.curve(metric) for run in runs)]
    if not metrics:
        raise ReportError(f"{title}: the runs have no metrics in common to compare")
    figures = [_figure(by_arm, metric, _QUANTITIES[metric]) for metric in metrics]
    first, *others = by_arm
    heads = {arm: f"{arm} ({len(own)})" for arm, own in by_arm.items()}
    tables = []
    for span in _SPANS:
        found = [(_QUANTITIES[metric], _summary(by_arm, metric, span)) for metric in metrics]
        means = [[name, *(_shown(own.mean) for own in row.values())] for name, row in found]
        tables.append(Table(f"{span.capitalize()}, by arm (runs)", ("", *heads.values()), means))
        if others:
            rows = [[name, *(_shown(row[arm].difference) for arm in others)] for name, row in found]
            head = f"Difference from {first}, {span}"
            tables.append(Table(head, ("", *(heads[arm] for arm in others)), rows))
    seeds = sorted({run.seed for run in runs})
    facts = [("runs", str(len(runs))), ("arms", str(len(by_arm))), ("seeds", str(len(seeds)))]
    notes = {
        "at the end": "mean over the last fifth of the steps of a run that have the quantity",
        "over the run": "mean over all of these steps",
        _QUANTITIES[_GAP]: "sparse actor against dense policy, at the same weights",
        "±": "half of the 95 % interval over runs (Student's t; Welch's for differences)",
        "seeds": ", ".join(map(str, seeds)),
    }
    return Section("comparison", title, facts, figures, tables, [Settings("How to read", notes)])


def comparison_data(runs: Sequence[SeededRun]) -> dict[str, Any]:
    """The numbers of `comparison_section` for JSON: each value with `half` of its interval, and
    what it is the mean of, by run.

    `made_by` are the devices, versions and commits of the runs, without repetition; `settings`
    those that all runs share.
    """
    by_arm = _by_arm(runs)
    quantities = {
        metric: {span: _summary(by_arm, metric, span) for span in _SPANS} for metric in _QUANTITIES
    }
    made_by = [{name: run.made_by.get(name) for name in _MADE_BY} for run in runs]
    return {
        "made_by": [own for index, own in enumerate(made_by) if own not in made_by[:index]],
        "settings": _shared_settings(runs),
        "interval": "95 % over runs: Student's t, Welch's for differences from the first arm",
        "arms": [
            {
                "arm": arm,
                "seeds": [run.seed for run in own],
                "steps": [max((int(row["step"]) for row in run.rows), default=0) for run in own],
                **{
                    metric: {span: asdict(found[arm]) for span, found in spans.items()}
                    for metric, spans in quantities.items()
                    if any(run.curve(metric) for run in own)
                },
            }
            for arm, own in by_arm.items()
        ],
    }


@dataclass(frozen=True)
class _Summary:
    """Values of an arm's runs, their mean and its difference from the first arm; None where there
    is nothing."""

    values: Sequence[float | None]
    mean: Interval | None
    difference: Interval | None


def _by_arm(runs: Sequence[SeededRun]) -> dict[str, list[SeededRun]]:
    arms = dict.fromkeys(run.arm for run in runs)
    return {arm: [run for run in runs if run.arm == arm] for arm in arms}


def _summary(
    by_arm: Mapping[str, Sequence[SeededRun]], metric: str, span: str
) -> dict[str, _Summary]:
    by_run = {
        arm: [getattr(run, _SPANS[span])(metric) for run in own] for arm, own in by_arm.items()
    }
    values = {arm: [value for value in own if value is not None] for arm, own in by_run.items()}
    first = next(iter(values.values()))
    return {
        arm: _Summary(
            by_run[arm],
            mean_interval(own) if own else None,
            difference_interval(own, first) if own and first and own is not first else None,
        )
        for arm, own in values.items()
    }


def _shown(interval: Interval | None) -> str:
    return "–" if interval is None else str(interval)


def _figure(by_arm: Mapping[str, Sequence[SeededRun]], metric: str, name: str) -> Figure:
    """Means over the runs of each arm, at the steps that all of them have, with intervals."""
    lines = []
    for index, (arm, runs) in enumerate(by_arm.items()):
        curves = [run.curve(metric) for run in runs]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not steps:
            continue
        at = [mean_interval([curve[step] for curve in curves]) for step in steps]
        band = None if at[0].half is None else [(each.half or 0.0) for each in at]
        lines.append(
            Line(
                arm,
                steps,
                [each.value for each in at],
                PALETTE[index % len(PALETTE)],
                low=band and [each.value - half for each, half in zip(at, band, strict=True)],
                high=band and [each.value + half for each, half in zip(at, band, strict=True)],
            )
        )
    note = "Mean over the runs of an arm, with its 95 % interval where there are several."
    return Figure(Chart(f"{name[0].upper()}{name[1:]}, by arm", "step", "", lines), note)
