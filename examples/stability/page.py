"""The page of the study: plots and what happened, in words, as Markdown.

In: the results folder, with settings, the record of pretraining, schedules, what distillation gains
and the metrics of all runs. Out: README.md and two pictures in it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from findings import (
    KL,
    LENGTH,
    PAPER_TAIL,
    PASS_RATE,
    REWARD,
    TAIL_OF_BIN,
    ArmSummary,
    Rows,
    ends,
    sentences,
    steadiness,
    summarise,
)

from sparrow_sglang.benchmarks.training.distill_result import AGGRESSIVE, GIVEN, PAIRS, gains
from sparrow_sglang.mismatch.tail import BIN_TOKENS
from sparrow_sglang.schedule import BudgetSchedule

PAGE = "README.md"
CURVES = {
    REWARD: "reward of rollouts",
    PASS_RATE: "held-out pass rate, dense decode",
    LENGTH: "response length (tokens)",
    KL: "KL(rollout || dense) a token",
}


def write_page(results: Path) -> Path:
    """Write README.md and its pictures from what `results` holds; returns the page."""
    settings = _json(results / "settings.json")
    arms = {
        arm: [_rows(results / "metrics" / f"{arm}-seed{seed}.jsonl") for seed in settings["seeds"]]
        for arm in settings["arms"]
    }
    summaries = [summarise(arm, runs) for arm, runs in arms.items()]
    plot_curves(results / "curves.png", arms)
    bins = sorted({index for summary in summaries for index in summary.tails})
    plot_tails(results / "tails.png", arms, bins)
    page = results / PAGE
    text = "\n".join(_lines(results, settings, summaries))
    page.write_text(f"{text}\n", "utf-8")
    return page


def plot_curves(path: Path, arms: Mapping[str, Sequence[Rows]]) -> None:
    """Reward, pass rate, length and KL against steps: mean over the seeds, and their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, CURVES.items(), strict=True):
        for arm, runs in arms.items():
            _draw(axes, arm, runs, key)
        axes.set(title=title, xlabel="step")
        if key == KL:
            axes.set_yscale("symlog", linthresh=1e-4)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def plot_tails(path: Path, arms: Mapping[str, Sequence[Rows]], bins: Sequence[int]) -> None:
    """Tail of the acceptance rate against steps, one panel for each position bin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * max(1, len(bins)), 4), layout="constrained")
    panels = figure.subplots(1, max(1, len(bins)), squeeze=False, sharey=True)[0]
    for axes, index in zip(panels, bins, strict=False):
        for arm, runs in arms.items():
            _draw(axes, arm, runs, f"{TAIL_OF_BIN}{index}")
        axes.axhline(PAPER_TAIL, linestyle="--", color="grey", linewidth=1)
        span = f"{index * BIN_TOKENS} to {(index + 1) * BIN_TOKENS - 1}"
        axes.set(title=f"tail at positions {span}", xlabel="step", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def _draw(axes: Any, arm: str, runs: Sequence[Rows], key: str) -> None:
    """One arm in its own colour, whichever other arms have this quantity."""
    curves = [{row["step"]: row[key] for row in rows if key in row} for rows in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    # Each call takes the next colour of the cycle, if the arm has nothing to draw too.
    (line,) = axes.plot([], [])
    if not steps:
        return
    values = np.array([[curve[step] for step in steps] for curve in curves])
    colour = line.get_color()
    axes.plot(steps, values.mean(0), "o-", markersize=2, color=colour, label=arm)
    axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def _lines(
    results: Path, settings: Mapping[str, Any], summaries: Sequence[ArmSummary]
) -> Iterator[str]:
    record = _json(results / "pretraining.json")
    last = record["history"][-1]
    task, runs = settings["walk"], [run for summary in summaries for run in summary.runs]
    yield "# Where reinforcement learning from sparse rollouts is stable"
    yield ""
    yield (
        f"{len(summaries)} ways to roll out, seeds {', '.join(map(str, settings['seeds']))}, from"
        f" one checkpoint. Task: walk through a graph of {task['least_nodes']} to"
        f" {task['most_nodes']} nodes (edges from each: {task['degree']}) for {task['steps']}"
        " steps; the reward is the share of right steps, and the pass rate its mean over held-out"
        f" graphs. Model: Qwen3 architecture, {record['parameters'] / 1e6:.1f}M parameters,"
        f" {last['step']} steps of supervised training in {last['seconds']:.0f} s, which ended at a"
        f" reward of {last['reward']:.3f} by its own measure; at the first evaluation of the runs"
        f" {np.mean([run.first for run in runs]):.3f}."
    )
    yield ""
    packages = record["packages"]
    yield (
        f"{record['device']}, SGLang {packages['sglang']}, torch {packages['torch']}, commit"
        f" `{record['commit']}`: `{record['command']}`, settings in [settings.json](settings.json),"
        " metrics of each step in [metrics](metrics)."
    )
    yield from ("", "## What happened", "")
    yield from (f"- {sentence}" for sentence in sentences(summaries))
    yield from (f"- {sentence}" for sentence in steadiness(summaries))
    yield from ("", "![reward, pass rate, length and KL against steps](curves.png)", "")
    yield from ("![tail of the acceptance rate against steps](tails.png)", "")
    yield (
        "Lines are means over the seeds, bands their range. The tail is the 5th percentile of the"
        " exact acceptance rate over generated tokens; the dashed line is the paper's"
        f" {PAPER_TAIL}; the lowest one is a mean over a tenth of a run's steps, in the worst run."
        " A run is called collapsed if its last pass rate is clearly below its best"
        " and below half of it, learnt or lost if it is clearly above or below the first; clearly"
        " means by two standard errors. These names compare a run's ends; its largest fall is that"
        " of the reward of rollouts below its running best, as a share of that best. An arm keeps"
        " up if none of its runs has collapsed or lost, and its last pass rate is not clearly below"
        " that of dense rollouts."
    )
    yield from ("", "## Numbers", "")
    yield from _table(summaries)
    yield from ("", "## Distillation at fixed schedules", "")
    yield from _distillation(_json(results / "distillation.json"))
    yield from ("", "## Schedules", "")
    yield from _schedules(results / "schedules", settings["arms"])


def _table(summaries: Sequence[ArmSummary]) -> Iterator[str]:
    columns: dict[str, Callable[[ArmSummary], str]] = {
        "arm": lambda s: s.arm,
        "pass rate, first": lambda s: f"{s.first:.3f}",
        "last, by seed": lambda s: ", ".join(f"{run.last:.3f}" for run in s.runs),
        "reward, first → last": lambda s: f"{s.rewards[0]:.3f} → {s.rewards[1]:.3f}",
        "largest fall, by seed": lambda s: ", ".join(f"{run.reward_fall:.0%}" for run in s.runs),
        "length, first → last": lambda s: f"{s.lengths[0]:.0f} → {s.lengths[1]:.0f}",
        "lowest tail by bin": lambda s: _by_bin(s.lowest_tails),
        "median": lambda s: _by_bin(s.tails),
        "median KL": lambda s: f"{s.kl:.2g}",
        "runs": lambda s: ", ".join(run.outcome for run in s.runs),
    }
    yield f"| {' | '.join(columns)} |"
    yield f"| --- |{' ---: |' * (len(columns) - 2)} --- |"
    for summary in summaries:
        yield f"| {' | '.join(cell(summary) for cell in columns.values())} |"


def _by_bin(tails: Mapping[int, float]) -> str:
    return ", ".join(f"{tail:.3f}" for tail in tails.values()) or "–"


def _distillation(result: Mapping[str, Any]) -> Iterator[str]:
    """Tails by bin, before and after, of an adapter that no reward has been spent on."""
    (arm,) = result["rows"]
    tails = arm["tails"][-1]
    names = {which: result["schedules"][which]["name"] for which in (GIVEN, AGGRESSIVE)}
    found = {pair: gains(result["before"][pair[0]], tails[pair[1]]) for pair in PAIRS}
    own = [row for pair in PAIRS[:2] for row in found[pair]]
    first_kl, last_kl = ends([arm["steps"]], "kl")
    yield (
        f"An adapter trained under {names[AGGRESSIVE]} alone, the model frozen: after"
        f" {tails['after']['step']} steps, on {tails['after']['responses']} responses, the tail on"
        f" fresh graphs is above what it was, outside both 95 % intervals, in"
        f" {sum(row['raised'] for row in own)} of {len(own)} bins of both schedules; under"
        f" {names[AGGRESSIVE]} it is at least what {names[GIVEN]} had without the adapter in"
        f" {sum(row['reached'] for row in found[PAIRS[2]])} of {len(found[PAIRS[2]])}."
    )
    yield ""
    yield (
        f"The tail was lower with the adapter in {sum(row['after'] < row['before'] for row in own)}"
        f" of those {len(own)} bins, and the divergence that it was trained on went from"
        f" {first_kl:.3f} to {last_kl:.3f} (means over the first and the last tenth of the steps)."
    )
    if last_kl > first_kl:
        yield (
            "Pages that are not read can keep the divergence from falling. They do not explain that"
            " it rises; what does is not known."
        )
    # Measured last, and missing in a result that was cut short.
    if cost := result.get("cost"):
        yield ""
        yield (
            f"A step took {cost['adapter_step_s']:.2f} s, {cost['share_of_dense_update']:.0%} of a"
            " dense update on the same responses."
        )
    yield from (
        "",
        "| before → after | positions | tail | tokens |",
        "| --- | ---: | ---: | ---: |",
    )
    for (old, new), rows in found.items():
        for row in rows:
            first, end = row["positions"]
            yield (
                f"| {names[old]} → {names[new]} | {first} to {end - 1} |"
                f" {row['before']:.3f} → {row['after']:.3f} |"
                f" {row['tokens'][0]} and {row['tokens'][1]} |"
            )


def _schedules(folder: Path, arms: Mapping[str, Any]) -> Iterator[str]:
    yield "| schedule | KV budget in tokens, by bin | tokens a bin |"
    yield "| --- | --- | ---: |"
    for path in sorted(folder.glob("*.json")):
        schedule = BudgetSchedule.from_json(path)
        budgets = ", ".join(map(str, schedule.budget_tokens))
        yield (
            f"| [calibrated, tail {schedule.tail_target}](schedules/{path.name}) | {budgets} |"
            + (f" {schedule.bin_tokens} |")
        )
    yield ""
    used = ", ".join(f"{arm}: {how['schedule']}" for arm, how in arms.items())
    yield f"Rolled out under {used}."


def _rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
