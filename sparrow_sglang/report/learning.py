"""Section of learning curves: several schedules, each over several seeds.

In: the rows that `benchmarks.learning_curves` writes, or the metrics of runs by arm and seed. Out:
one chart per quantity, a line per schedule or arm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from sparrow_sglang.report.charts import PALETTE, Chart, Line
from sparrow_sglang.report.page import Figure, Section, Settings, number
from sparrow_sglang.report.run_files import json_lines
from sparrow_sglang.report.sources import SEED_FILE

_SHOWN = {
    "eval/pass_rate": "Held-out pass rate",
    "critic/score/mean": "Reward",
    "response_length/mean": "Response length, tokens",
    "sparrow/accept_p05": "Tail of the acceptance rate",
    "rollout_corr/kl": "KL to the dense policy",
}


@dataclass(frozen=True)
class LearningRun:
    """One run: curves of (step, value) by metric."""

    schedule: str
    seed: int
    curves: Mapping[str, Sequence[tuple[int, float]]]

    @property
    def label(self) -> str:
        return Path(self.schedule).name.removesuffix(".json")


def arms_section(folder: Path, files: Sequence[Path]) -> Section:
    """The section of runs with metrics files in one folder, named by arm and seed.

    Raises `ReportError`.
    """
    runs = []
    for path in files:
        named = SEED_FILE.fullmatch(path.name)
        assert named is not None, "files are chosen by that name"
        rows = json_lines(path)
        curves = {
            metric: [(row["step"], row[metric]) for row in rows if metric in row]
            for metric in _SHOWN
        }
        runs.append(LearningRun(schedule=named[1], seed=int(named[2]), curves=curves))
    place = folder.resolve()
    seeds = sorted({run.seed for run in runs})
    facts = {"folder": str(folder), "runs": str(len(runs)), "seeds": ", ".join(map(str, seeds))}
    settings = Settings("Files", facts)
    return learning_section(runs, f"Learning curves of {place.parent.name}/{place.name}", settings)


def learning_section(runs: Sequence[LearningRun], title: str, versions: Settings) -> Section:
    """Means over the seeds of each schedule, at the steps that all seeds reached, with bands from
    the lowest to the highest."""
    labels = list(dict.fromkeys(run.label for run in runs))
    figures, facts = [], []
    for metric, name in _SHOWN.items():
        lines = []
        for index, label in enumerate(labels):
            own = [dict(run.curves.get(metric, ())) for run in runs if run.label == label]
            steps = sorted(set.intersection(*(set(curve) for curve in own)))
            if not steps:
                continue
            values = [[curve[step] for curve in own] for step in steps]
            means = [mean(at) for at in values]
            colour = PALETTE[index % len(PALETTE)]
            low, high = [min(at) for at in values], [max(at) for at in values]
            lines.append(Line(label, steps, means, colour, low, high))
            if metric == "eval/pass_rate":
                facts.append(
                    (f"{name}, {label}", f"{number(means[0], 3)} → {number(means[-1], 3)}")
                )
        if lines:
            note = "Mean over seeds; the band reaches from the lowest to the highest."
            figures.append(Figure(Chart(name, "step", "", lines), note))
    return Section(kind="benchmark", title=title, facts=facts, figures=figures, settings=[versions])
