"""Several runs compared by arm, with intervals over their seeds."""

import warnings
from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np

from sparrow_sglang.command_line import table
from sparrow_sglang.report.page import flat, number
from sparrow_sglang.report.sources import GAP, PASS_RATE, ReportError, Row, Run, Sources, read_run
from sparrow_sglang.run_folder import ENTROPY, REWARD, TAIL

_Means = tuple[float | None, float | None]
_COMPARED = {
    PASS_RATE: "held-out pass rate",
    REWARD: "reward",
    GAP: "reward less held-out pass rate",
    "sparrow/zero_std_fraction": "groups with equal rewards",
    "response_length/mean": "response length, tokens",
    ENTROPY: "entropy, nats",
    "sparrow/entropy_gap": "entropy, sparse less dense",
    "sparrow/distill_entropy_gap": "the same where the adapter learns",
    TAIL: "tail of the acceptance rate",
    "sparrow/kv_tokens_read": "KV tokens read",
    "sparrow/distill_scale": "scale of the adapter",
    "sparrow/distill_p05_scale0": "tail without the adapter",
    "sparrow/distill_p05_scale1": "tail with the adapter at scale 1",
    "rollout_corr/k3_kl": "KL, rollout to dense policy",
    "sparrow/rollout_tokens_per_s": "rollout, tokens/s",
    "timing_s/step": "seconds per step",
}
# Settings that may differ between runs of one arm.
_NOT_OF_AN_ARM = ("run_dir", "seed", "logging.", "checkpoint.")
_SPANS = ("at the end", "over the run")
_END = 0.2
_CONFIDENCE = 0.95


def compare(sources: Sources) -> dict[str, Any]:
    """Several runs by arm, as JSON values: runs whose settings differ in no more than the seed.
    Each quantity has values, mean and difference from the first arm as `_compared` gives them, at
    the end of a run and over all of it. Steps that not all runs have taken are left out, which
    `sources.left_out` notes. Raises `ReportError` if fewer than two runs can be read."""
    runs = []
    for folder in sources.runs:
        try:
            runs.append(read_run(folder))
        except ReportError as error:
            sources.left_out.append(str(error))
    if len(runs) < 2:
        reasons = "; ".join(sources.left_out)
        raise ReportError(f"expected two or more runs to compare, got {len(runs)}: {reasons}")
    shortest = min(runs, key=lambda run: run.steps_done)
    end = shortest.steps_done
    if any(run.steps_done > end for run in runs):
        sources.left_out.append(f"steps after {end}, which {shortest.folder} has not taken")
    runs = [run.cut(end) for run in runs]
    arms = _arms(runs)
    values = {
        arm: {m: [_summary(run, m) for run in group] for m in _COMPARED}
        for arm, group in arms.items()
    }
    first = next(iter(values.values()))
    fields = ("device", "python", "packages", "commit")
    origins = [{name: run.start.get(name) for name in fields} for run in runs]
    settings = [_compared_settings(run.config) for run in runs]
    return {
        "made_by": [each for i, each in enumerate(origins) if each not in origins[:i]],
        "settings": {
            name: value
            for name, value in settings[0].items()
            if value != "off" and all(other.get(name) == value for other in settings)
        },
        "interval": "95 % over runs: Student's t, Welch's for differences from the first arm",
        "arms": [
            {
                "arm": arm,
                "seeds": [run.config.get("seed", 0) for run in group],
                "steps": [run.steps_done for run in group],
                **{
                    metric: _compared(values[arm][metric], first[metric] if index else ())
                    for metric in _COMPARED
                    if any(run.curve(metric) for run in group)
                },
            }
            for index, (arm, group) in enumerate(arms.items())
        ],
    }


def comparison_table(comparison: Row) -> str:
    arms = comparison["arms"]
    letters = [chr(ord("A") + i % 26) * (1 + i // 26) for i in range(len(arms))]
    rows = [["mean at the end", *letters]]
    for metric, label in _COMPARED.items():
        if any(metric in arm for arm in arms):
            means = (arm.get(metric, {}).get(_SPANS[0], {}).get("mean") for arm in arms)
            rows.append([label, *map(_interval_text, means)])
    lines = [
        f"{letter}: {arm['arm']} ({len(arm['seeds'])} runs)"
        for letter, arm in zip(letters, arms, strict=True)
    ]
    return "\n".join([*lines, table(rows), "±: half of the 95 % interval over the runs of an arm"])


def _interval_text(interval: Row | None) -> str:
    if interval is None:
        return "–"
    half = "" if interval["half"] is None else f" ± {number(interval['half'], 2)}"
    return f"{number(interval['value'], 3)}{half}"


def _arms(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by arm, which is named by the settings in which the runs differ."""
    settings = [_compared_settings(run.config) for run in runs]
    names = sorted({name for values in settings for name in values})
    differing = [n for n in names if len({values.get(n) for values in settings} - {"off"}) > 1]
    arms: dict[str, list[Run]] = {}
    for run, values in zip(runs, settings, strict=True):
        name = ", ".join(f"{n}={v}" for n in differing if (v := values.get(n, "–")) != "off")
        arm = (name or "all") if run.config else run.folder.name
        arms.setdefault(arm, []).append(run)
    return arms


def _compared_settings(config: Row) -> dict[str, str]:
    """Settings by name; those of a part that is switched off are all "off"."""
    values = flat(config)
    switches = {name for name in values if name.endswith(".enabled")}
    off = tuple(name.removesuffix("enabled") for name in switches if values[name] == "False")
    return {
        name: "off" if name.startswith(off) and name not in switches else value
        for name, value in values.items()
        if not name.startswith(_NOT_OF_AN_ARM)
    }


def _summary(run: Run, metric: str) -> _Means:
    """Means over the last fifth of the steps that have the metric, and over all of them."""
    values = list(run.curve(metric).values())
    if not values:
        return None, None
    return mean(values[-max(1, round(len(values) * _END)) :]), mean(values)


def _compared(of_runs: Sequence[_Means], first: Sequence[_Means]) -> dict[str, Any]:
    """By span: values of an arm's runs, their mean and its difference from the `first` arm's."""
    compared = {}
    for i, span in enumerate(_SPANS):
        values = [value for means in of_runs if (value := means[i]) is not None]
        others = [value for means in first if (value := means[i]) is not None]
        compared[span] = {
            "values": [means[i] for means in of_runs],
            "mean": interval(values) if values else None,
            "difference": interval(values, others) if values and others else None,
        }
    return compared


def interval(values: Sequence[float], others: Sequence[float] = ()) -> dict[str, float | None]:
    """Mean of independent values less that of `others`, and half of its 95 % interval. `half` is
    None where a side has one value. Freedom is Welch's approximation."""
    from scipy.stats import ttest_1samp, ttest_ind

    value = mean(values) - (mean(others) if others else 0.0)
    if len(values) < 2 or len(others) == 1:
        return {"value": value, "half": None}
    # Of equal values the interval is not a number, or one that scipy warns of.
    with warnings.catch_warnings(action="ignore"):
        test = ttest_ind(values, others, equal_var=False) if others else ttest_1samp(values, 0.0)
        low, high = test.confidence_interval(_CONFIDENCE)
    return {"value": value, "half": float(np.nan_to_num(high - low)) / 2}
