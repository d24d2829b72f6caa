"""What two selection rules read for the same tail: rows, and what is run to get them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow_sglang.benchmarks import figures, tables
from sparrow_sglang.benchmarks.processes import ProcessFailed
from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT
from sparrow_sglang.benchmarks.rollouts import rule_comparison
from sparrow_sglang.benchmarks.rollouts.rule_comparison import rule_rows
from sparrow_sglang.calibration.options import RULES
from sparrow_sglang.commands import cli
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.report.result_files import Run
from sparrow_sglang.schedule import BudgetSchedule

TARGETS = (0.75, 0.86, 0.92)
READ = "kv_tokens_read"
# 4 layers of 2 KV heads of 64.
SHAPE = ModelShape(256, 512, 4, 4, 2, 64, 1000)
PAGE = {"page_size": 16, "bin_tokens": 512, "tail_target": 0.8}
PUBLISHED = BudgetSchedule(name="published", budget_tokens=(128, 256), **PAGE)
CALIBRATED = BudgetSchedule(
    name="calibrated",
    budget_tokens=(96, 128),
    dense_layers=(),
    selection={"landmark_tokens": 4, "landmark_bits": 4, "landmark_pairs": 16},
    **PAGE,
)


def check(schedule: BudgetSchedule, tail: float | None) -> dict[str, Any]:
    bins = [
        {"bin": 0, "tokens": 0, "verdict": "too few tokens"},
        {
            "bin": 1,
            "tail": tail,
            "tail_low": 0.7,
            "tail_high": 0.9,
            "tokens": 9,
            "verdict": "holds",
        },
    ]
    return {schedule.name: {"schedule": schedule.name, "bins": bins}}


def rows(schedule: BudgetSchedule) -> list[dict[str, Any]]:
    checks = {"samples": check(schedule, 0.81), "text": check(schedule, 0.82)}
    return list(rule_rows(schedule.name, [schedule], checks, SHAPE))


def test_a_row_says_what_a_step_reads_and_which_tail_that_gave() -> None:
    first, second = rows(PUBLISHED)
    assert (first["cached_tokens"], second["cached_tokens"]) == (256, 768)
    # Two layers are dense and two read the budget.
    assert first["kv_tokens_read"] == (2 * 256 + 2 * 128) / 4
    assert second["kv_tokens_read"] == (2 * 768 + 2 * 256) / 4
    keys_and_values = second["kv_tokens_read"] * 4 * 2 * 2 * 64 * 2
    # Each of 48 pages but 3 sink and recent ones has a mean of 64 numbers of 2 bytes.
    landmarks = 2 * 2 * (48 - 3) * 64 * 2
    assert second["bytes_read"] == keys_and_values + landmarks
    assert first["samples"]["tail"] is None and second["text"]["tail"] == 0.82


def test_int4_landmarks_and_sparse_layers_count_as_they_are() -> None:
    second = rows(CALIBRATED)[1]
    assert second["kv_tokens_read"] == 128
    # In each layer a page has four landmarks: 16 pairs, half a byte a number, a scale of 2 bytes.
    landmarks = 4 * 2 * (48 - 3) * 4 * (16 + 2)
    assert second["bytes_read"] == 128 * 4 * 2 * 2 * 64 * 2 + landmarks


def test_the_table_puts_the_rules_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    content = {
        "device": "NVIDIA X",
        "packages": dict.fromkeys(("sglang", "torch", "triton", "flashinfer-python"), "1"),
        "commit": "c",
        "command": "rule_comparison.py --samples 2 --out x.json",
        "model": "m",
        "rows": rows(PUBLISHED) + rows(CALIBRATED),
    }
    (folder / "rules.json").write_text(json.dumps(content))
    lines = [line for line in tables.generate(tmp_path).splitlines() if line.startswith("| m |")]
    assert [line.split(" | ")[2:4] for line in lines] == [
        ["256", "published"], ["256", "calibrated"], ["768", "published"], ["768", "calibrated"],
    ]  # fmt: skip
    assert "0.810 (0.700 to 0.900) | 0.820 (0.700 to 0.900)" in lines[2]
    assert " | – | – | " in lines[0]


def test_the_figure_has_a_line_for_each_rule() -> None:
    run = Run(
        "rules.json", {"device": "X", "model": "m", "rows": rows(PUBLISHED) + rows(CALIBRATED)}
    )
    read, samples, text = figures.draw_rules(run, figures.LIGHT).axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in read.lines]
    assert drawn == [([256, 768], [96, 128]), ([256, 768], [192, 512])]
    labels = [text.get_text().strip() for text in read.texts]
    assert labels == ["0.8 calibrated", "0.8 published"]
    # A bin without an interval is left out.
    for axes, tail in ((samples, 0.81), (text, 0.82)):
        published, calibrated = axes.containers
        for container in (published, calibrated):
            line, _, (bars,) = container
            assert list(line.get_ydata()) == [tail]
            ((_, low), (_, high)) = bars.get_segments()[0]
            assert (low, high) == pytest.approx((0.7, 0.9))


def test_what_the_docs_say_was_measured() -> None:
    """docs/selection.md: its table, and the ratios and counts below it."""
    text = (ROOT / "docs/selection.md").read_text("utf-8")
    folder = ROOT / RESULTS / "h200"
    measured = json.loads((folder / "rule_comparison_smollm2-135m.json").read_text("utf-8"))["rows"]
    by = {
        (rule, target): [r for r in measured if (r["rule"], r["target"]) == (rule, target)]
        for target in (0.75, 0.86, 0.92)
        for rule in RULES
    }
    assert [len(bins) for bins in by.values()] == [8] * 6

    def lowest(bins: list[dict[str, Any]], check: str) -> str:
        judged = [row[check] for row in bins if row[check]["verdict"] != "too few tokens"]
        worst = min(judged, key=lambda tail: tail["tail"])
        return f"{worst['tail']:.3f} ({worst['tail_low']:.3f} to {worst['tail_high']:.3f})"

    def total(rule: str, target: float, key: str) -> float:
        return sum(row[key] for row in by[rule, target])

    for (rule, target), bins in by.items():
        read, size = (total(rule, target, key) / 8 for key in ("kv_tokens_read", "bytes_read"))
        missed = [row["text"]["verdict"] for row in bins].count("fails")
        line = (
            f"| {target} | {rule} | {read:,.0f} | {size / 1e6:.1f} | {lowest(bins, 'samples')} |"
            f" {lowest(bins, 'text')} | {missed} of 8 |"
        )
        assert line in text

    def shares(key: str) -> list[str]:
        return [f"{total('calibrated', t, key) / total('published', t, key):.2f}" for t in TARGETS]

    sparse, dense, landmarks = [], [], []
    for target in TARGETS:
        # Of 30 layers two are dense under the published rule; 3 KV heads of 64, 2 bytes a value.
        cached, read = (total("published", target, key) for key in ("cached_tokens", READ))
        dense.append(f"{2 / 30 * cached / read:.0%}".replace("%", " %"))
        budgets = sum(min(r["budget_tokens"], r["cached_tokens"]) for r in by["published", target])
        sparse.append(f"{total('calibrated', target, READ) / budgets:.2f}")
        landmarks.append(
            [
                total(rule, target, "bytes_read") - total(rule, target, READ) * 30 * 2 * 3 * 64 * 2
                for rule in RULES
            ]
        )
    parts = [
        size / total(rule, target, "bytes_read")
        for target, sizes in zip(TARGETS, landmarks, strict=True)
        for rule, size in zip(RULES, sizes, strict=True)
    ]
    ratios = {f"{calibrated / published:.2f}" for published, calibrated in landmarks}
    tokens, size = shares(READ), shares("bytes_read")
    verdicts = {
        (rule, check): [row[check]["verdict"] for t in TARGETS for row in by[rule, t]]
        for rule in RULES
        for check in ("samples", "text")
    }
    held = {rule: verdicts[rule, "samples"].count("holds") for rule in RULES}
    missed = {rule: verdicts[rule, "text"].count("fails") for rule in RULES}
    said = " ".join(text.split())
    for words in (
        f"reads {tokens[0]} of the KV tokens and {size[0]} of the bytes for 0.75, {tokens[1]} and"
        f" {size[1]} for 0.86, {tokens[2]} and {size[2]} for 0.92",
        f"{held['published']} of 24 under the published rule, {held['calibrated']} of 24 under",
        f"in {missed['published']} of 24 bins, the calibrated one in {missed['calibrated']}",
        f"read {sparse[0]}, {sparse[1]} and {sparse[2]} of the tokens for 0.75, 0.86 and 0.92",
        f"take {dense[0]}, {dense[1]} and {dense[2]} of the tokens that it reads",
        f"landmarks are {min(parts):.0%} to {max(parts):.0%} of the bytes".replace("%", " %"),
        f"and fall to {ratios.pop()} only",
    ):
        assert words in said
    assert not ratios
    assert not any("fails" in verdicts[rule, "samples"] for rule in RULES)
    unjudged = [r for r in measured if r["samples"]["verdict"] == "too few tokens"]
    assert {r["cached_tokens"] < 2048 for r in unjudged} == {True}


def test_every_command_is_one_that_sparrow_knows(tmp_path: Path) -> None:
    options = rule_comparison._parser().parse_args(["--work", str(tmp_path)])
    options.engine_args = {}
    for rule in ("published", "calibrated"):
        calibrate, *checks = (
            cli._parser().parse_args(words)
            for words in rule_comparison.commands(options, rule, tmp_path / "texts.jsonl")
        )
        assert calibrate.rule == rule and calibrate.target == [0.75, 0.86, 0.92]
        files = [str(tmp_path / f"{rule}-{target}.json") for target in (0.75, 0.86, 0.92)]
        assert [parsed.check for parsed in checks] == [files, files]
        assert len({str(parsed.work) for parsed in checks}) == 2


def test_what_a_work_folder_has_is_not_measured_again(tmp_path: Path, monkeypatch: Any) -> None:
    options = rule_comparison._parser().parse_args(["--work", str(tmp_path)])
    options.engine_args = {}
    done = [files for rule in RULES for files in rule_comparison.outputs(options, rule)]
    for file in [file for files in done[:-1] for file in files]:
        file.write_text("{}")
    run: list[Sequence[str]] = []

    @contextmanager
    def logged(command: Sequence[str], *_: Any) -> Iterator[Any]:
        run.append(command)
        if len(run) == 2:
            done[-1][0].write_text("{}")
        # A check that misses its target and one that fails both end with status 1.
        yield SimpleNamespace(args=command, wait=lambda: 1)

    monkeypatch.setattr(rule_comparison, "logged_process", logged)
    monkeypatch.setattr(rule_comparison, "log_end", lambda log: "no memory")
    with pytest.raises(ProcessFailed, match="(?s)status 1; .*no memory"):
        rule_comparison.run_side_by_side(options, tmp_path / "texts.jsonl")
    rule_comparison.run_side_by_side(options, tmp_path / "texts.jsonl")
    assert [command[command.index("--out") + 1] for command in run] == [str(done[-1][0])] * 2


def test_a_work_folder_is_not_gone_on_with_under_other_options(tmp_path: Path) -> None:
    def options(seed: int) -> Any:
        return rule_comparison._parser().parse_args(["--work", str(tmp_path), "--seed", str(seed)])

    rule_comparison.require_same_options(options(1))
    rule_comparison.require_same_options(options(1))
    with pytest.raises(ValueError, match="made with seed=1, got 2"):
        rule_comparison.require_same_options(options(2))
