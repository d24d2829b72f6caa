"""The figures that docs/benchmarks.md and the README quote stand in the committed results."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from sparrow_sglang.calibration.choice import MeasuredTails, choose
from sparrow_sglang.mismatch.tail import BinTail
from sparrow_sglang.schedule import BudgetSchedule

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
LINK = re.compile(r"\[[^\]]+\]\(\.\./(benchmarks/results/[^)]+\.json)\)")


def table(section: str) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Cells by head, and the rows of the linked result, for each line of a section's table."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    heads = [cell.strip() for cell in lines[0].strip("|").split("|")]
    found = []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        link = LINK.fullmatch(cells[-1])
        assert link, line
        rows = json.loads((ROOT / link[1]).read_text())["rows"]
        found.append((dict(zip(heads, cells, strict=True)), rows))
    return found


def words_of(arm: dict[str, Any]) -> str:
    """What the fidelity page calls an arm."""
    own = dict(setting.split("=") for setting in arm["arm"].split(", "))
    words = [own["engine.schedule"]]
    if own["distill.enabled"] == "True":
        changes = {
            "at 1e-3": float(own["distill.lr"]) == 1e-3,
            "exact KL": own["distill.loss"] == "exact",
            "forward KL": own["distill.direction"] == "forward",
            "total variation": own["distill.direction"] == "tv",
            "restarted": own["distill.restart_kl"] == "0.05",
            "half": own["distill.most"] == "0.5",
        }
        changed = [change for change, holds in changes.items() if holds]
        if own["distill.entropy"] == "5.0":
            words.append("adapter")
        elif words == ["smollm2-135m-0.75"]:
            words = ["without term", *changed] if changed else ["adapter without entropy term"]
        else:
            words += ["adapter", *changed]
    return ", ".join(words + ["no correction"] * (own["algorithm.correction"] == "none"))


def test_training_runs_of_the_fidelity_page() -> None:
    """Each row is an arm of the linked comparison, the first one its reference."""
    file = RESULTS / "h200" / "stability_smollm2-135m_adapter.json"
    arms = {words_of(arm): arm for arm in json.loads(file.read_text())["arms"]}
    page = (ROOT / "docs" / "fidelity.md").read_text("utf-8")
    heads, _, *lines = page[page.index("| schedule |") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (heads, *lines)]
    assert rows[1][0] == next(iter(arms)) and len(rows) > 10
    for row in rows[1:]:
        cells = dict(zip(rows[0], row, strict=True))
        arm = arms[cells["schedule"]]
        assert int(cells["seeds"]) == len(arm["seeds"])
        for head, metric, span, places in (
            ("pass rate", "eval/pass_rate", "at the end", 3),
            ("reward at the end", "critic/score/mean", "at the end", 3),
            ("tail", "sparrow/accept_p05", "over the run", 3),
            ("KV read", "sparrow/kv_tokens_read", "over the run", 0),
        ):
            found = arm[metric][span]
            text = f"{found['mean']['value']:.{places}f}"
            difference = found["difference"]
            if head == "pass rate" and difference and difference["half"] is not None:
                text += f" ({difference['value']:+.3f}±{difference['half']:.3f})"
            assert cells[head] == text, (row, head)


def budgets_of_gemma(rule: str, target: float) -> tuple[float, float]:
    """KV tokens and bytes that a step reads in a layer, summed over the middles of the bins, under
    the schedule that the measured tails give."""
    path = RESULTS / "h100" / f"calibration_gemma3-270m_{rule}.json"
    schedule = BudgetSchedule.from_json(path)
    evidence: Any = schedule.provenance
    tails = {
        int(budget): {
            row["bin"]: BinTail(
                first_position=0, end_position=0, mean_low=None, mean_high=None, **row
            )
            for row in rows
        }
        for budget, rows in evidence["tails"].items()
    }
    weights = [weight for weight in schedule.selection.layer_weights or [1.0] * 3 if weight]
    measured = MeasuredTails(tails, schedule.bin_tokens, evidence["min_tokens"], min(weights))
    tokens = read = 0.0
    for choice in choose(measured, target, 8):
        cached = (choice.bin + 0.5) * schedule.bin_tokens
        own = [min(cached, max(3, int(w * choice.budget / 16 + 0.5)) * 16) for w in weights]
        tokens += sum(own) / len(own)
        # Keys and values of 256 numbers in 16 bits, and the landmarks of all pages.
        landmarks = schedule.selection.landmark_bytes(16, 256, 2)
        read += sum(own) / len(own) * 1024 + cached / 16 * landmarks
    return tokens, read


def test_what_the_calibrated_rule_saves_on_gemma() -> None:
    text = (ROOT / "docs" / "selection.md").read_text("utf-8")
    for part, unit in enumerate(("KV tokens", "bytes")):
        ratios = [
            budgets_of_gemma("calibrated", target)[part]
            / budgets_of_gemma("published", target)[part]
            for target in (0.75, 0.86, 0.92)
        ]
        first, second, third = (f"{ratio:.2f}" for ratio in ratios)
        assert f"{first}, {second} and {third} of the {unit}" in text


@pytest.mark.parametrize(("rule", "misses"), [("calibrated", 4), ("published", 5)])
def test_checks_of_gemma(rule: str, misses: int) -> None:
    for kind, expected in (("fresh", 0), ("texts", misses)):
        name = f"calibration_check_gemma3-270m_{rule}_{kind}.json"
        checks = json.loads((RESULTS / "h100" / name).read_text())["checks"]
        verdicts = [row["verdict"] for check in checks for row in check["bins"]]
        judged = [verdict for verdict in verdicts if not verdict.startswith("too few")]
        assert (len(judged), judged.count("fails")) == (24, expected)
        link = f"[{misses}](../benchmarks/results/h100/{name})"
        assert kind == "fresh" or link in (ROOT / "docs" / "selection.md").read_text("utf-8")


def test_runs_of_the_task_of_sums() -> None:
    name = "stability_smollm2-135m_math.json"
    arms = json.loads((RESULTS / "h100" / name).read_text())["arms"]
    text = (ROOT / "docs" / "fidelity.md").read_text("utf-8")
    sums = text[text.index("**Sums**") :].partition("\n\n")[0]
    none, adapter, _, dense = (
        [
            f"{arm['sparrow/accept_p05']['over the run']['mean']['value']:.3f}",
            f"{arm['critic/score/mean']['at the end']['mean']['value']:.3f}",
        ]
        for arm in arms
    )
    for number in none + adapter + dense:
        assert number in sums


def test_the_second_seed_in_verl() -> None:
    text = (ROOT / "examples" / "verl" / "README.md").read_text("utf-8")
    runs = json.loads((RESULTS / "h200" / "verl_words_smollm2-135m_seed2.json").read_text())["runs"]
    sparse, dense = runs["sparse"]["metrics"], runs["dense"]["metrics"]
    scores = [
        f"{fmean(part):.3f}"
        for metrics in (sparse, dense)
        for values in [metrics["critic/score/mean"]]
        for part in (values[:9], values[-9:])
    ]
    tail = f"{fmean(sparse['sparrow/accept_p05']):.3f}"
    kl = [f"{fmean(metrics['rollout_corr/kl']):.4f}" for metrics in (sparse, dense)]
    said = " ".join(text[text.index("[A second seed]") :].partition("In the shapes")[0].split())
    for number in (*scores, tail, *kl):
        assert number in said


def test_calibration_costs() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text("utf-8")
    for gpu in ("h100", "h200"):
        for row in json.loads((RESULTS / gpu / "calibration_cost.json").read_text())["rows"]:
            spent = row["seconds"]
            budgets = spent["budgets"]
            counts = row["generations"]
            done, planned = f"{counts['measured']:,}", f"{counts['planned']:,}"
            minutes = round(row["seconds_in_all_extrapolated"] / 60)
            assert (
                f"| {sum(spent.values()) - budgets} s | {budgets} s for {done} of {planned}"
                f" | {minutes} min |" in page
            )


def backend_in(cell: str) -> tuple[str, str]:
    """A time, and the backend in brackets behind it."""
    match = re.fullmatch(r"([\d.]+) \((\w+)\)", cell)
    assert match, cell
    return match[1], match[2]


def served(row: dict[str, Any], backend: str, schedule: str | None = None) -> bool:
    own = row["schedule"] and Path(row["schedule"]).name.removesuffix(".json")
    return bool(row["backend"] == backend and (own == schedule or backend != "sparrow"))


@pytest.mark.parametrize(("cells", "rows"), table("Decode steps"), ids=lambda part: str(part)[:90])
def test_steps(cells: dict[str, str], rows: list[dict[str, Any]]) -> None:
    model, *ways = cells["model"].split(", ")
    case = cells["batch × context"].replace(" × ", "x")
    expected = {"tp": 1, "ep": 1} | {
        way.split()[0].lower(): int(way.split()[1]) for way in ways if not way.startswith("FP8")
    }
    for row in rows:
        assert (row.get("kv_cache_dtype") == "fp8_e4m3") == ("FP8 KV" in ways)
        assert (row.get("quantization") == "fp8") == ("FP8 weights" in ways)
    same = [row for row in rows if (row["model"], row["case"]) == (model, case)]
    same = [row for row in same if all(row.get(k, 1) == v for k, v in expected.items())]
    dense_ms, backend = backend_in(cells["dense ms"])
    [sparse] = [row for row in same if served(row, "sparrow", cells["schedule"])]
    [dense] = [row for row in same if served(row, backend)]
    # The dense side is the fastest of the file.
    assert dense["step_ms"] == min(row["step_ms"] for row in same if not row["schedule"])
    assert dense_ms == f"{dense['step_ms']:.2f}"
    assert cells["sparse ms"] == f"{sparse['step_ms']:.2f}"
    assert cells["speed-up"] == f"{dense['step_ms'] / sparse['step_ms']:.2f}×"
    assert cells["floor ms"] == f"{sparse['floor_ms']:.2f}"


def test_prefill_rollouts_kernels_and_training_steps() -> None:
    for cells, rows in table("Prefill"):
        case = cells["batch × context"].replace(" × ", "x")
        for backend in ("fa3", "sparrow"):
            row = next(r for r in rows if (r["case"], r["backend"]) == (case, backend))
            assert cells[f"{backend} s"] == f"{row['prefill_s']:.2f}"
    for cells, rows in table("Rollouts"):
        dense_s, backend = backend_in(cells["dense s"])
        [sparse] = [row for row in rows if served(row, "sparrow", cells["schedule"])]
        [dense] = [row for row in rows if served(row, backend)]
        assert (dense_s, cells["sparse s"]) == tuple(f"{r['seconds']:.1f}" for r in (dense, sparse))
        for name, row in (("dense", dense), ("sparse", sparse)):
            assert cells[f"{name} tokens/s"] == f"{row['tokens_per_s']:,.0f}"
        ratio = sparse["tokens_per_s"] / dense["tokens_per_s"]
        assert cells["speed-up"] == f"{ratio:.2f}×"
    for cells, rows in table("Kernels"):
        pages = re.search(r"(\d+) pages", cells["kernel"])
        name = f"decode bs 16 pages {pages[1]} group 2" if pages else "select bs 16 context 32K"
        [row] = [row for row in rows if row["name"] == name]
        assert (cells["µs"], cells["floor µs"]) == (f"{row['us']:.1f}", f"{row['floor_us']:.1f}")
    for cells, rows in table("Training steps"):
        tokens, ranks = int(cells["tokens"]), int(cells["GPUs"])
        [row] = [r for r in rows if r["tokens"] == tokens and r["dtype"] == "bfloat16"]
        assert row.get("ranks", 1) == ranks
        assert cells["step s"] == f"{min(row['step_s']):.2f}"
        assert cells["step peak GiB"] == f"{row['step_peak_gib']:.1f}"
        if cells["adapter step s"]:
            assert cells["adapter step s"] == f"{min(row['adapter_step_s']):.2f}"
            assert cells["adapter peak GiB"] == f"{row['adapter_peak_gib']:.1f}"


def test_the_readmes_speedups_are_on_the_page() -> None:
    """Ratios such as 2.78× that the README quotes."""
    quoted = set(re.findall(r"\d\.\d\d×", README))
    assert len(quoted) >= 4
    assert {ratio for ratio in quoted if ratio not in PAGE} == set()
