"""The README's figures and the numbers in its text are those of the committed results."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import pytest
import summary
import torch

from sparrow_sglang.attention_backends.reference import select_pages
from sparrow_sglang.benchmarks import figures
from sparrow_sglang.benchmarks.figures import speedup_points
from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT, load_runs
from sparrow_sglang.calibration.options import RULES
from sparrow_sglang.report.result_files import Run
from sparrow_sglang.report.step_pairs import dense_backends

README = (ROOT / "README.md").read_text(encoding="utf-8")
H100, H200 = (ROOT / RESULTS / device for device in ("h100", "h200"))
STUDY = ROOT / "examples" / "stability" / "results"
DESCRIPTION = re.compile(r"<dc:description>(.*?)</dc:description>", re.DOTALL)


def step(backend: str, step_ms: float, case: str = "16x8192", **fields: Any) -> dict[str, Any]:
    schedule = "qwen3-4b-0.86" if backend == "sparrow" else None
    row = {"model": "qwen3-4b", "backend": backend, "case": case, "step_ms": step_ms}
    return row | {"schedule": schedule} | fields


def run(name: str, *rows: dict[str, Any], device: str = "H200") -> Run:
    return Run(name, {"device": device, "rows": list(rows)})


def test_committed_figures_are_up_to_date() -> None:
    for name, drawn in figures.figures().items():
        committed = (ROOT / figures.FIGURES / name).read_text(encoding="utf-8")
        again = f"run: {figures.COMMAND}"
        assert DESCRIPTION.findall(committed) == DESCRIPTION.findall(drawn), again
        # Another version of matplotlib writes the same figure differently.
        if f"Matplotlib v{matplotlib.__version__}" in committed:
            assert committed == drawn, again


def test_the_dense_side_is_the_fastest_backend_that_was_measured() -> None:
    def fastest(*runs: Run) -> tuple[Any, ...]:
        [point] = speedup_points(runs)
        pair = point.pair
        assert pair.dense and pair.dense["step_ms"] / pair.sparse["step_ms"] == point.speedup
        where = (point.model, point.context)
        return *where, pair.dense["backend"], pair.dense["step_ms"], pair.dense_run is pair.run

    own = run("a", step("sparrow", 2.0), step("flashinfer", 8.0))
    assert fastest(own) == ("qwen3-4b", 8192, "flashinfer", 8.0, True)
    # If the sparse row's own run has timed a backend, other runs' times of it do not count.
    other = run("b", step("flashinfer", 7.0))
    assert fastest(own, other) == fastest(own)
    faster = run("b", step("fa3", 6.0), step("fa3", 5.0, "16x4096"))
    assert fastest(own, faster) == ("qwen3-4b", 8192, "fa3", 6.0, False)
    slower = run("b", step("fa3", 9.0))
    assert fastest(own, slower) == fastest(own)
    pairs = [point.pair for point in speedup_points([own, faster])]
    assert dense_backends(pairs) == "SGLang's FlashAttention-3"
    again = run("c", step("sparrow", 4.0), step("flashinfer", 8.0))
    for runs in ([own, again], [again, own]):
        assert [point.speedup for point in speedup_points(runs)] == [2]


def test_only_like_cases_are_drawn() -> None:
    dense = [
        step("flashinfer", 8.0, case) for case in ("16x8192", "8x8192", "fill:1000-2000:16000")
    ]
    sparse = [
        step("sparrow", 2.0, schedule="fixed-1024"),
        step("sparrow", 2.0, "8x8192"),
        step("sparrow", 2.0, "fill:1000-2000:16000"),
        step("sparrow", 2.0, "16x4096"),
    ]
    assert speedup_points([run("a", *dense, *sparse)]) == []
    assert figures.fullest_device([]) == ("", [])
    runs = [
        run("a", step("sparrow", 2.0), step("flashinfer", 4.0), device="NVIDIA A"),
        run("b", step("flashinfer", 1.0), device="NVIDIA B"),
    ]
    device, points = figures.fullest_device(runs)
    assert (device, [point.speedup for point in points]) == ("A", [2])


def test_labels_do_not_cover_each_other() -> None:
    apart = figures._apart([3.0, 2.38, 2.27, 2.3, 1.7], gap=0.2)
    assert apart == pytest.approx([3.0, 2.67, 2.27, 2.47, 1.7])


@pytest.mark.parametrize("scores", [figures.SCORES, (0.5,) * 9, (0.1, 0.9, 0.1, 0.9, 0.1)])
@pytest.mark.parametrize("kept", [4, figures.KEPT])
def test_the_diagram_keeps_the_pages_that_decode_keeps(
    scores: tuple[float, ...], kept: int
) -> None:
    # The first page and the last two are always kept, so their scores do not matter.
    row = torch.tensor([[[0.0, *scores, 1.0, 0.0]]])
    pages = torch.tensor([row.shape[-1]])
    chosen = select_pages(row, pages, torch.minimum(pages, torch.tensor([kept])), 1, 2)
    assert figures.kept_pages(scores, kept) == chosen[0, 0].tolist()


# -- numbers in the text


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def study(arm: str) -> list[list[dict[str, float]]]:
    files = sorted((STUDY / "metrics").glob(f"{arm}-seed*.jsonl"))
    return [[json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files]


def study_passes(arm: str) -> tuple[float, float]:
    """Held-out pass rates at the first and at the last evaluation, means over the seeds."""
    rates = [[row["eval/pass_rate"] for row in r if "eval/pass_rate" in row] for r in study(arm)]
    return fmean(rate[0] for rate in rates), fmean(rate[-1] for rate in rates)


def rule_shares(key: str) -> dict[float, str]:
    """Ratio of what steps read under the calibrated and under the published rule, by target."""
    rows = load(H200 / "rule_comparison_smollm2-135m.json")["rows"]
    read = {
        (rule, target): sum(
            row[key] for row in rows if (row["rule"], row["target"]) == (rule, target)
        )
        for rule in ("calibrated", "published")
        for target in (0.75, 0.86, 0.92)
    }
    return {t: f"{read['calibrated', t] / read['published', t]:.2f}" for t in (0.75, 0.86, 0.92)}


def rule_verdicts(rule: str, check: str) -> list[str]:
    rows = load(H200 / "rule_comparison_smollm2-135m.json")["rows"]
    verdicts = [row[check]["verdict"] for row in rows if row["rule"] == rule]
    assert len(verdicts) == 24
    return [verdict for verdict in verdicts if verdict != "too few tokens"]


def measured_figures() -> dict[str, str]:
    """Every figure that the README quotes, as it writes it, and the words beside it."""
    runs = load_runs(ROOT, "step_ms")
    device, points = figures.fullest_device(runs)
    dense_side = f"{dense_backends([point.pair for point in points])} dense decode"
    at = {(p.model, p.context): p for p in points}
    small, longest = at["qwen3-1.7b", 496], at["qwen3-1.7b", 32768]
    assert longest.pair.dense
    sparse_ms, dense_ms = (row["step_ms"] for row in (longest.pair.sparse, longest.pair.dense))
    gains = [f"{at[f'qwen3-{size}', 32768].speedup:.2f}×" for size in ("4b", "8b", "14b")]
    steps = load(H100 / "decode_step_qwen3-1.7b.json")["rows"]
    longest_steps = [row for row in steps if row["case"] == "16x32768"]
    of_h100 = {(row["backend"], row["schedule"]): row["step_ms"] for row in longest_steps}
    fa3_ms, published_ms = of_h100["fa3", None], of_h100["sparrow", "qwen3-1.7b-0.86"]
    sparse, dense = load(H200 / "rollout_qwen3-1.7b.json")["rows"]
    _, faster = load(H200 / "rollout_qwen3-1.7b_int4_pairs.json")["rows"]
    assert (sparse["backend"], dense["backend"], faster["backend"]) == (
        "sparrow",
        "flashinfer",
        "fa3",
    )
    assert sparse["output_tokens"] == faster["output_tokens"]
    mean = sparse["output_tokens"] / sparse["sequences"]
    ratio = sparse["tokens_per_s"] / dense["tokens_per_s"]
    less = {
        model: next(
            each["speedup"]
            for each in load(H200 / f"decode_step_{model}.json")["speedups"]
            if (each["case"], each["schedule"]) == ("16x32768", "fixed-1024")
        )
        for model in ("qwen3-30b-a3b", "qwen3.5-9b")
    }
    checks = load(H200 / "calibration_check_smollm2-135m.json")["checks"]
    bins = [each for check in checks for each in check["bins"] if each["verdict"] != "dense"]
    passes = {arm: study_passes(arm) for arm in load(STUDY / "settings.json")["arms"]}
    starts = sorted(first for first, _ in passes.values())
    parameters = load(STUDY / "pretraining.json")["parameters"]
    rows = load(H200 / "learning_curves_story.json")["rows"]
    arms = [
        [row for row in rows if (row["schedule"] == "dense") is dense] for dense in (True, False)
    ]
    told = []
    for arm in arms:
        rates = [dict(row["curves"]["eval/pass_rate"]) for row in arm]
        told.append((fmean(r[0] for r in rates), [r[20] for r in rates]))
    curves = {
        key: fmean(value for row in arms[1] for _, value in row["curves"][f"sparrow/{key}"])
        for key in ("kv_tokens_read", "kv_tokens_held", "accept_p05")
    }
    tokens, read = rule_shares("kv_tokens_read"), rule_shares("bytes_read")
    samples = rule_verdicts("calibrated", "samples")
    assert set(samples) == {"holds"}
    missed = {rule: rule_verdicts(rule, "text").count("fails") for rule in RULES}
    return {
        "rules": f"{tokens[0.86]} of the KV tokens and {read[0.86]} of the bytes that the published"
        f" rule reads for a tail of 0.86, {tokens[0.92]} and {read[0.92]} for 0.92,"
        f" {tokens[0.75]} and {read[0.75]} for 0.75",
        "rules checked": f"held on fresh prompts in all {len(samples)} bins judged, those from 2K"
        f" tokens on, and along other"
        f" text missed in {missed['calibrated']} of 24 bins, by the published rule in"
        f" {missed['published']}",
        "step": f"is {longest.speedup:.2f}× as fast for Qwen3-1.7B ({sparse_ms:.2f} ms"
        f" instead of {dense_ms:.2f} ms), {gains[0]} for 4B, {gains[1]} for 8B,"
        f" {gains[2]} for 14B",
        "H100": f"On an H100, Qwen3-1.7B is {fa3_ms / published_ms:.2f}× as fast as with"
        f" FlashAttention-3 ({published_ms:.2f} ms instead of {fa3_ms:.2f} ms).",
        "less KV": f"with a budget of 1,024 tokens {less['qwen3-30b-a3b']:.2f}× for"
        f" Qwen3-30B-A3B and {less['qwen3.5-9b']:.2f}× for Qwen3.5-9B.",
        "conditions": f"one {device}, {figures.BATCH} sequences of equal length",
        "dense": f"against {dense_side}.",
        "alternative text": f"over {dense_side} against context",
        "short": f"({small.speedup:.2f}× at 496 tokens)",
        "rollout": f"rollout of {sparse['sequences']} sequences (mean {mean:,.0f} tokens, longest"
        f" {sparse['longest']:,}; Qwen3-1.7B) takes {sparse['seconds']:.1f} s instead of"
        f" {dense['seconds']:.1f} s ({ratio:.2f}×) with FlashInfer, or {faster['seconds']:.1f} s"
        f" ({faster['seconds'] / sparse['seconds']:.2f}×) with FlashAttention-3.",
        "bins": f"target held in all {len(bins)} bins",
        "story before": f"from {told[0][0]:.3f} and {told[1][0]:.3f}",
        "story": "dense rollouts {:.3f} ± {:.3f}, sparse {:.3f} ± {:.3f}".format(
            *(value for _, last in told for value in (fmean(last), stdev(last)))
        ),
        "story read": f"with {curves['kv_tokens_read']:.0f} of {curves['kv_tokens_held']:.0f} KV"
        f" tokens read and a tail of {curves['accept_p05']:.3f}",
        "study": f"{parameters / 1e6:.1f}M parameters, {len(study('dense')[0]) - 1} steps",
        "study before": f"from {starts[0]:.2f} to {starts[-1]:.2f}",
        "study dense": f"dense {passes['dense'][1]:.3f}",
        "study calibrated": f"above {figures.TARGET}: calibrated"
        f" {passes['calibrated-0.86'][1]:.3f} (`0.86`) and"
        f" {passes['calibrated-0.75'][1]:.3f} (`0.75`)",
        "study adapter": f"0.80 with a DistillSparse adapter {passes['distilled-0.80'][1]:.3f}",
        "study small": f"under 128 tokens {passes['fixed-128'][1]:.3f} and under 64 tokens"
        f" {passes['fixed-64'][1]:.3f}",
    }


def test_every_figure_in_the_readme_was_measured() -> None:
    text = " ".join(README.split())
    quoted = measured_figures()
    assert {name: words for name, words in quoted.items() if words not in text} == {}
    for check in load(H200 / "calibration_check_smollm2-135m.json")["checks"]:
        assert not [each for each in check["bins"] if each["verdict"] == "fails"]
    # And nothing else in its prose looks like a measurement.
    prose = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`|<[^>]*>", " ", README, flags=re.DOTALL)
    prose = " ".join(prose.split())
    for words in quoted.values():
        prose = prose.replace(" ".join(re.sub(r"`[^`]*`", " ", words).split()), "")
    left = re.findall(r"\d[\d.,]*(?:×| ms| s\b| ?%)|\b0\.\d\d+", prose)
    assert left == []


def test_the_limit_in_the_readme_is_that_of_the_runs() -> None:
    def rates(arm: str) -> list[list[float]]:
        return [[row["eval/pass_rate"] for row in r if "eval/pass_rate" in row] for r in study(arm)]

    dense = [curve[-1] for curve in rates("dense")]
    for arm in ("fixed-64", "fixed-128"):
        for first, *_, last in rates(arm):
            assert first < last < min(dense)
        assert all(min(curve) < curve[0] - 0.05 for curve in rates(arm))
    [lost] = rates("fixed-128-sequence")
    assert lost[-1] < 0.05
    for arm in ("calibrated-0.86", "calibrated-0.75", "distilled-0.80"):
        assert summary.lowest(study(arm), f"{summary.TAIL_OF_BIN}0") > figures.TARGET


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 160
