"""What docs/training.md says of learning with partial rollouts is in the committed result."""

import json
from statistics import mean

import numpy as np
from scipy import stats

from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT


def test_the_page_says_what_partial_rollouts_learnt() -> None:
    path = ROOT / RESULTS / "cpu" / "learning_curves_partial_walk.json"
    curves: dict[str, dict[int, np.ndarray]] = {}
    for row in json.loads(path.read_text())["rows"]:
        rates = [rate for _, rate in row["curves"]["eval/pass_rate"]]
        curves.setdefault(row["arm"], {})[row["seed"]] = np.array(rates)
    whole, partial = curves.values()
    assert sorted(whole) == sorted(partial) == [0, 1, 2, 3, 4]

    def interval(differences: list[float]) -> str:
        middle = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        words = [f"{x:+.3f}".replace("-", "−") for x in (mean(differences), *middle)]
        return f"{words[0]}|{words[1]} to {words[2]}"

    page = " ".join((ROOT / "docs/training.md").read_text("utf-8").split())
    for arm, words in ((partial, "partial rollouts"), (whole, "whole ones")):
        start, end = (mean(rates[i] for rates in arm.values()) for i in (0, -1))
        assert f"from {start:.3f} to {end:.3f} with {words}" in page
    last = interval([partial[seed][-1] - whole[seed][-1] for seed in whole])
    assert "is {} (95 % interval {})".format(*last.split("|")) in page
    area = interval([float((partial[seed] - whole[seed]).mean()) for seed in whole])
    assert "and {} ({}) on average".format(*area.split("|")) in page
