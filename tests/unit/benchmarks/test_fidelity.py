"""The figures of docs/fidelity.md are those of the committed results."""

import json
from operator import truediv
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import summary

from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT
from sparrow_sglang.benchmarks.tables import learning_rows, rates_of_budget
from sparrow_sglang.benchmarks.training.distill_result import AGGRESSIVE, GIVEN, gains
from sparrow_sglang.report.result_files import Run

H200 = ROOT / RESULTS / "h200"
STUDY = ROOT / "examples/stability/results"


def load(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def rows() -> dict[int, str]:
    lines = (ROOT / "docs/fidelity.md").read_text("utf-8").splitlines()
    cells = [line.split("|")[1:-1] for line in lines if line.startswith("| ")]
    return {int(row[0]): " | ".join(row[2:]) for row in cells if row[0].strip().isdigit()}


def assert_says(row: str, *phrases: str) -> None:
    assert [phrase for phrase in phrases if phrase not in row] == []


def fixed_budgets(schedule: Path) -> dict[int, list[dict[str, Any]]]:
    """Tails of each fixed budget, in the bins that lie above it and below the context's end."""
    content = load(schedule)
    width, provenance = content["bin_tokens"], content["provenance"]
    end = provenance["settings"]["context"]
    return {
        int(budget): [row for row in tails if int(budget) <= row["bin"] * width < end]
        for budget, tails in provenance["tails"].items()
    }


def moved(tails: list[dict[str, Any]]) -> str:
    """Whether the tail "falls" or "rises" from first to last bin, "" if the intervals overlap."""
    first, last = tails[0], tails[-1]
    return (
        "falls" if last["high"] < first["low"] else "rises" if last["low"] > first["high"] else ""
    )


def study_metrics(arm: str) -> list[list[dict[str, Any]]]:
    """Rows of the training steps of each run."""
    files = sorted((STUDY / "metrics").glob(f"{arm}-seed*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()][:-1] for file in files]


def reached(result: dict[str, Any]) -> str:
    """Count bins where the more aggressive schedule with adapter reaches the given one without."""
    [row] = result["rows"]
    pairs = gains(result["before"][GIVEN], row["tails"][-1][AGGRESSIVE])
    return f"{sum(pair['reached'] for pair in pairs)} of {len(pairs)}"


def test_there_are_nine_claims(rows: dict[int, str]) -> None:
    assert sorted(rows) == list(range(1, 10))
    assert [row for row in rows if "not measured" in rows[row]] == [9]


def listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def signed(row: dict[str, Any], name: str) -> str:
    """A value with its interval, negative ones with a minus sign."""
    value, low, high = (f"{row[name + end]:.3f}" for end in ("", "_low", "_high"))
    return f"{value} ({low} to {high})".replace("-", "−")


def test_distribution_of_rates(rows: dict[int, str]) -> None:
    file = H200 / "acceptance_distribution_smollm2-135m.json"
    run = Run(file.name, load(file))
    budgets = run.content["settings"]["budgets"]
    found = [rates_of_budget(run, budget) for budget in budgets]
    dense, _, _ = rates_of_budget(run, None)
    under = f"under {listed([f'{budget:,}' for budget in budgets])} tokens"

    def shares(threshold: str) -> str:
        return listed([f"{100 * every[f'share_above_{threshold}']:.1f} %" for every, _, _ in found])

    assert_says(
        rows[1],
        f"{shares('0.999')} of the tokens above 0.999 {under}",
        f"{shares('0.99')} above 0.99",
        f"dense decode {100 * dense['share_above_0.999']:.1f} % above 0.999,"
        f" at a mean of {dense['mean']:.3f}",
    )
    of_all = [f"{every['beta_ks']:.3f}" for every, _, _ in found]
    distances = [distance for _, _, of_bins in found for distance in of_bins]
    assert_says(
        rows[3],
        f"distance {listed(of_all)} {under}",
        f"{min(distances):.3f} to {max(distances):.3f} by bin",
        f"below 0.06 in {sum(distance < 0.06 for distance in distances)} of {len(distances)} bins",
        f"Dense decode {dense['beta_ks']:.3f}",
    )
    _, correlation, _ = rates_of_budget(run, 512)
    assert_says(
        rows[4],
        f"single tokens {signed(correlation, 'tokens_r')}",
        f"tails of {correlation['bins']} bins {signed(correlation, 'tails_r')}",
        f"their means {signed(correlation, 'means_r')}",
    )
    more = more_bytes(run)
    assert_says(
        rows[6],
        *(
            f"pages of {row['page_size']}, rounded {row['schedule'].rpartition('-')[2]}:"
            f" {signed(row, 'tail_difference')}"
            for row in run.rows
            if row["kind"] == "difference"
        ),
        f"Down they read {-more['page32-down']} % and {-more['page64-down']} % less than pages"
        f" of 16, up {more['page32-up']} % and {more['page64-up']} % more",
    )


def more_bytes(run: Run) -> dict[str, int]:
    """Percent more bytes that each schedule reads than the reference, mean over bins."""
    bytes_read: dict[str, list[int]] = {}
    for row in run.rows:
        if row["kind"] == "page size":
            bytes_read.setdefault(row["schedule"], []).append(row["bytes_read"])
    reference = bytes_read.pop(f"fixed-{run.content['settings']['reference_budget']}")
    return {
        name: round(100 * (mean(map(truediv, of, reference)) - 1))
        for name, of in bytes_read.items()
    }


def test_tails_at_fixed_budgets(rows: dict[int, str]) -> None:
    demo = fixed_budgets(ROOT / "sparrow_sglang/schedules/smollm2-135m-0.86.json")
    falling = [budget for budget, tails in demo.items() if moved(tails) == "falls"]
    assert set(demo) - set(falling) == {6144} and len(demo[6144]) == 4
    study = fixed_budgets(STUDY / "schedules/walk-0.86.json")
    directions = {budget: moved(tails) for budget, tails in study.items() if len(tails) > 1}
    assert all((way == "falls") == (budget >= 256) for budget, way in directions.items())
    assert all(study[budget][0]["tail"] < 0.6 for budget in directions if budget < 256)
    ways = list(directions.values())
    assert_says(
        rows[2],
        f"from {demo[512][0]['tail']:.3f} to {demo[512][-1]['tail']:.3f} over 8K",
        f"in {len(falling)} of {len(demo)} budgets from 64 to 6144",
        f"in all {ways.count('falls')} budgets from 256 to {max(directions)}",
        f"under the {ways.count('')} smaller ones",
    )


def test_tail_and_mean_under_a_schedule(rows: dict[int, str]) -> None:
    first, *_, last = load(H200 / "distill_gain_smollm2-135m.json")["before"][GIVEN]
    assert last["tail_high"] < first["tail_low"] and last["mean_high"] < first["mean_low"]
    assert_says(
        rows[4],
        f"the tail falls from {first['tail']:.3f} to {last['tail']:.3f}",
        f"the mean from {first['mean']:.3f} to {last['mean']:.3f}",
    )
    share = (first["mean"] - last["mean"]) / (first["tail"] - last["tail"])
    assert share == pytest.approx(0.5, abs=0.05)

    checks = load(H200 / "calibration_check_smollm2-135m.json")
    bins = {
        check["schedule"]: [row for row in check["bins"] if row["verdict"] != "dense"]
        for check in checks["checks"]
    }
    assert {row["verdict"] for of in bins.values() for row in of} == {"holds"}
    tails = [row["tail"] for row in bins["smollm2-135m-0.86"]]
    gemma = load(H200 / "calibration_check_gemma3-270m.json")
    verdicts = [row["verdict"] for check in gemma["checks"] for row in check["bins"]]
    assert "fails" not in verdicts
    assert_says(
        rows[5],
        f"Gemma 3 270M, {gemma['settings']['num_prompts']} other prompts: held in all"
        f" {verdicts.count('holds')} bins judged",
        f"{checks['settings']['num_prompts']} other prompts",
        f"all {sum(map(len, bins.values()))} sparse bins",
        f"between {min(tails):.3f} and {max(tails):.3f}",
        f"under the schedule for 0.86 was {lowest('calibrated-0.86'):.3f} at the least, that for"
        f" 0.80 {lowest('distilled-0.80'):.3f} (",
        f"that for 0.75 {lowest('calibrated-0.75'):.3f}",
    )


def lowest(arm: str) -> float:
    return summary.lowest(study_metrics(arm), f"{summary.TAIL_OF_BIN}0")


def test_training(rows: dict[int, str]) -> None:
    run = Run(H200 / "x", load(H200 / "learning_curves_story.json"))
    tails = [
        [tail for _, tail in row["curves"]["sparrow/accept_p05"]]
        for row in run.rows
        if row["schedule"] != "dense"
    ]
    assert sorted({len(of) for of in tails}) == [23, 24]
    moves = (
        "{:.3f} and {:.3f} under ".format(*summary.ends(study_metrics(arm), "sparrow/accept_p05"))
        + name
        for arm, name in (
            ("calibrated-0.86", "the schedule for 0.86"),
            ("fixed-256", "a fixed 256"),
            ("fixed-128", "a fixed 128"),
        )
    )
    assert_says(
        rows[7],
        ", ".join(f"{mean(of[:5]):.3f} and {mean(of[-5:]):.3f}" for of in tails),
        ", ".join(moves),
    )
    learnt = {cells[0]: cells for cells in learning_rows(run)}
    arms = ("calibrated-0.86", "calibrated-0.75", "fixed-256", "fixed-128", "fixed-64")
    low = [f"{lowest(arm):.3f}" for arm in arms]
    assert_says(
        rows[8],
        f"was {min(map(min, tails)):.3f} at the least",
        f"pass rate {learnt['smollm2-135m-0.86'][4]} after {learnt['dense'][2]} steps,"
        f" dense {learnt['dense'][4]}",
        f"the schedule for 0.86 {area(arms[0])}, that for 0.75 {area(arms[1])}, at lowest tails of"
        f" {low[0]} and {low[1]}; a fixed 256 {area(arms[2])} (one pair), 128 {area(arms[3])}, 64"
        f" {area(arms[4])}, at {listed(low[2:])}",
        f"ends at {last_rate(arms[3]):.3f} with truncated importance sampling,"
        f" {last_rate('fixed-128-none'):.3f} without correction,"
        f" {last_rate('fixed-128-sequence'):.3f} with the geometric mean of a response's ratios;"
        f" dense {last_rate('dense'):.3f}",
    )


def cells(arm: str) -> dict[str, str]:
    """The arm's row of the study's summary."""
    runs = summary.load_runs(STUDY)
    return summary.arm_cells(arm, runs[arm], runs[summary.DENSE])


def area(arm: str) -> str:
    return cells(arm)["area to dense"]


def last_rate(arm: str) -> float:
    runs = summary.load_runs(STUDY)[arm].values()
    return mean(summary.evaluations(rows)[-1].rate for rows in runs)


def test_adapters(rows: dict[int, str]) -> None:
    arms = ("distilled-0.80", "calibrated-0.86")
    runs = summary.load_runs(STUDY)
    pairs = summary.paired_differences(*(runs[arm] for arm in arms))
    assert len(pairs) == 7
    chosen = [row["sparrow/distill_scale"] for of in study_metrics(arms[0]) for row in of]
    assert_says(
        rows[9],
        f"lowest tail {lowest(arms[0]):.3f} with the adapter under 0.80,"
        f" {lowest(arms[1]):.3f} without",
        f"pass rate {last_rate(arms[0]):.3f} and {last_rate(arms[1]):.3f}, difference over all"
        f" evaluations {summary.with_interval([pair[0] for pair in pairs.values()])}",
        f"none of the adapter in {100 * chosen.count(0) / len(chosen):.0f} % of the steps",
        f"reached that for 0.86 in {reached(load(STUDY / 'distillation.json'))} bins",
        "0.65 with an adapter reached 0.75 without in"
        f" {reached(load(H200 / 'distill_gain_smollm2-135m_0.65.json'))} bins",
        "a fixed 256 reached a fixed 512 in"
        f" {reached(load(H200 / 'distill_gain_smollm2-135m.json'))}",
    )
