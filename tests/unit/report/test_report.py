"""`sparrow report`: what the page says is what the files say, and wrong input is one line."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
import pytest
from report_inputs import BIN, MOVED_AT, TARGETS, write_calibration, write_run

from sparrow_sglang.commands import cli
from sparrow_sglang.schedule import BudgetSchedule

RUN_STEPS = 12


class Page(HTMLParser):
    """Tables by title, charts by title, facts and section titles of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tables: dict[str, list[list[str]]] = {}
        self.charts: dict[str, list[tuple[str, dict[str, str | None]]]] = {}
        self.facts: dict[str, str] = {}
        self.sections: list[str] = []
        self._text = ""
        self._title = self._fact = ""
        self._chart: list[tuple[str, dict[str, str | None]]] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._text = ""
        if tag == "svg":
            self._chart = []
        elif self._chart is not None:
            self._chart.append((tag, dict(attrs)))
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag == "section":
            self.sections.append(dict(attrs)["data-kind"] or "")

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag: str) -> None:
        if self._chart is not None:
            if tag == "title":
                self.charts[self._text] = self._chart
            elif tag == "svg":
                self._chart = None
        elif tag == "summary":
            self._title = self._text
            self.tables[self._title] = []
        elif tag in ("td", "th"):
            self.tables[self._title][-1].append(self._text)
        elif tag == "dt":
            self._fact = self._text
        elif tag == "dd":
            self.facts[self._fact] = self._text

    def handle_data(self, data: str) -> None:
        self._text += data

    def records(self, title: str) -> list[dict[str, str]]:
        heads, *rows = self.tables[title]
        return [dict(zip(heads, row, strict=True)) for row in rows]

    def curve(self, title: str, series: int) -> np.ndarray:
        """Points [N, 2] of a line, in the chart's own units."""
        tags = self.charts[title]
        at = next(
            i for i, (_, a) in enumerate(tags) if (a.get("id") or "").endswith(f"series-{series}")
        )
        path = next(attributes["d"] for tag, attributes in tags[at:] if tag == "path")
        return np.array(re.findall(r"[ML] (\S+) (\S+)", path or ""), dtype=float)

    def cells(self, title: str) -> list[tuple[float, float, int | None]]:
        """Left edge, lower edge (down is more) and brightness of each cell of a heat map; None for
        a cell that is not filled."""
        tags = self.charts[title]
        at = next(i for i, (_, a) in enumerate(tags) if (a.get("id") or "").endswith("-cells"))
        found = []
        for tag, attributes in tags[at + 1 :]:
            if tag != "path":
                break
            x, y = map(float, re.findall(r"M (\S+) (\S+)", attributes["d"] or "")[0])
            fill = re.search(r"fill: #(\w{6})", attributes["style"] or "")
            found.append((x, y, sum(bytes.fromhex(fill[1])) if fill else None))
        return found


def report(place: Path, out: Path) -> Page:
    assert cli.main(["report", str(place), "--out", str(out)]) == 0
    return Page(out.read_text("utf-8"))


def value(cell: str) -> float:
    return float(cell.replace(",", ""))


def is_affine(drawn: np.ndarray, data: Any) -> bool:
    """Whether points are drawn at a linear scale of the data, to a tenth of a unit."""
    x, y = np.asarray(data, float).T
    for place, values in ((drawn[:, 0], x), (drawn[:, 1], y)):
        slope, start = np.polyfit(values, place, 1)
        if np.abs(slope * values + start - place).max() > 0.1 or not slope:
            return False
    # Larger values are drawn higher.
    return bool(np.polyfit(y, drawn[:, 1], 1)[0] < 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> Path:
    folder = tmp_path_factory.mktemp("run") / "story"
    write_run(folder, RUN_STEPS, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def run_page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(run, tmp_path_factory.mktemp("page") / "r.html")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    write_calibration(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def calibration_page(calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(calibration, tmp_path_factory.mktemp("page") / "r.html")


def test_a_run_says_what_its_metrics_say(run: Path, run_page: Page) -> None:
    page = run_page
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shown = page.records("Steps")
    assert [row["step"] for row in shown] == [str(row["step"]) for row in rows]
    for cells, row in zip(shown[:RUN_STEPS], rows, strict=False):
        for head, name in [
            ("reward", "critic/score/mean"),
            ("length", "response_length/mean"),
            ("entropy", "actor/entropy"),
            ("tail", "sparrow/accept_p05"),
            ("KV read", "sparrow/kv_tokens_read"),
            ("tokens/s", "sparrow/rollout_tokens_per_s"),
            ("seconds", "timing_s/step"),
        ]:
            assert value(cells[head]) == pytest.approx(row[name], rel=6e-4), (head, row["step"])
    assert (shown[-1]["reward"], shown[-1]["pass rate"]) == ("–", "0.75")
    assert page.facts["steps"] == f"{RUN_STEPS} of {RUN_STEPS}"
    assert page.facts["schedule"] == "fixed-512"
    assert dict(page.tables["Configuration"])["rollout.max_new_tokens"] == "3000"
    assert "after fixed-512" in page.records("Events")[0]["what happened"]
    versions = dict(page.tables["Versions"])
    assert versions["sglang"] == version("sglang") and versions["python"] == python_version()
    assert {"date", "device", "commit", "command"} <= versions.keys()

    steps = rows[:RUN_STEPS]
    for title, series, name in [
        ("Reward", 0, "critic/score/mean"),
        ("Response length", 1, "response_length/max"),
        ("Entropy", 0, "actor/entropy"),
        ("Acceptance rate of the rollouts", 0, "sparrow/accept_p05"),
        ("Tail by position", 1, "sparrow/accept_p05_bin1"),
        ("Rollout throughput", 0, "sparrow/rollout_tokens_per_s"),
        ("KV tokens per generated token", 1, "sparrow/kv_tokens_read"),
    ]:
        data = [(row["step"], row[name]) for row in steps]
        assert is_affine(page.curve(title, series), data), title
    assert {"Where the time of a step goes", "Rollout against dense policy"} <= page.charts.keys()
    # The chart marks the move and the target of the configuration, once each.
    ids = [a.get("id") or "" for _, a in page.charts["Tail by position"]]
    assert sum("-moment-" in i for i in ids) == sum("-target-" in i for i in ids) == 1
    assert MOVED_AT < RUN_STEPS and "target 0.83" in page.html


def test_versions_that_a_resumed_run_changed_are_shown_with_their_step(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path = folder / "run.json"
    (start,) = json.loads(path.read_text())["starts"]
    newer = start | {"step": 7, "packages": start["packages"] | {"torch": "99.0"}}
    same = start | {"step": 4, "date": "2030-01-01T00:00:00+00:00"}
    path.write_text(json.dumps({"starts": [start, same, newer | {"config": {"steps": 40}}]}))
    page = report(folder, tmp_path / "r.html")
    titles = [title for title in page.tables if title.startswith("Versions")]
    assert titles == ["Versions", "Versions from step 7 on"]
    assert dict(page.tables[titles[1]])["torch"] == "99.0"
    assert page.facts["steps"] == f"{RUN_STEPS} of 40"


def test_the_best_and_the_worst_response_of_some_steps_can_be_read(run_page: Page) -> None:
    excerpts = re.findall(
        r"<summary>(Step [^<]+)</summary>\n<pre[^>]*>([^<]*)</pre>", run_page.html
    )
    titles = [title for title, _ in excerpts]
    assert titles[:2] == [
        "Step 0, story/p0, reward 1, format 0.25, 1,001 tokens, stop",
        "Step 0, story/p0, reward 0, format 0.25, 1,002 tokens, stop",
    ]
    assert [title.split(",")[0] for title in titles] == [
        f"Step {step}" for step in (0, 0, 4, 4, 7, 7, 11, 11)
    ]
    text = excerpts[0][1]
    assert text.startswith("&lt;b&gt;0&lt;/b&gt; once upon") and text.endswith("the end")
    assert "[… 11,016 characters …]" in text


def test_stages_of_a_step_add_up_to_its_time(run: Path, run_page: Page) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The last area is the untimed rest, whose upper edge, run through backwards, is the whole.
    title = "Where the time of a step goes"
    edge = {x: y for x, y in sorted(map(tuple, run_page.curve(title, 4)), key=lambda p: -p[1])}
    drawn = np.array(sorted(edge.items()))
    data = [(row["step"], row["timing_s/step"]) for row in rows[:RUN_STEPS]]
    assert len(drawn) == RUN_STEPS and is_affine(drawn, data)


def test_a_calibration_says_what_its_schedules_say(
    calibration: Path, calibration_page: Page
) -> None:
    page = calibration_page
    # A calibration is one section whatever the number of targets; its check is another.
    assert page.sections == ["calibration", "check"]
    first = BudgetSchedule.from_json(calibration / f"m-{TARGETS[0]}.json")
    tails: Any = first.provenance["tails"]
    for cells in page.records("Tail by budget and position"):
        measured = {row["bin"]: row["tail"] for row in tails[cells["KV budget"]]}
        for index, tail in measured.items():
            span = f"{index * BIN}–{(index + 1) * BIN - 1}"
            assert value(cells[span]) == pytest.approx(tail, abs=6e-5)
    map_title = "Tail by position and KV budget"
    budgets = sorted(map(int, tails))
    measured = {
        (budgets.index(budget), row["bin"]): row["tail"]
        for budget in budgets
        for row in tails[str(budget)]
        if row["tokens"] >= 100
    }
    drawn = page.cells(map_title)
    columns, rows = (sorted({cell[axis] for cell in drawn}) for axis in (0, 1))
    shades = {(rows[::-1].index(y), columns.index(x)): s for x, y, s in drawn if s is not None}
    assert set(shades) == set(measured)
    ranked = sorted(measured, key=lambda place: measured[place])
    assert [shades[place] for place in ranked] == sorted(shades.values())
    assert len(set(shades.values())) > len(shades) // 2
    for series, target in enumerate(TARGETS):
        schedule = BudgetSchedule.from_json(calibration / f"m-{target}.json")
        bins: Any = schedule.provenance["bins"]
        shown = page.records(f"Bins of m-{target}")
        assert [value(row["budget"]) for row in shown] == list(schedule.budget_tokens)
        assert [row["basis"] for row in shown] == [row["basis"] for row in bins]
        assert [value(row["tokens"]) for row in shown] == [row["tokens"] for row in bins]
        path = page.curve(map_title, series)
        # The curve runs through the middle of its budget's row; cells are named by lower edges.
        height = rows[1] - rows[0]
        row_of_budget = budgets.index(schedule.budget_tokens[0])
        assert path[0, 1] == pytest.approx(rows[::-1][row_of_budget] - height / 2, abs=0.1)
        levels = page.curve("KV budget by length", series)
        steps = [b for budget in schedule.budget_tokens for b in (budget, budget)]
        edges = [e for i in range(len(steps) // 2) for e in (i * BIN, (i + 1) * BIN)]
        # matplotlib draws a stair's corners once where two levels are equal.
        assert set(np.round(levels[:, 0], 1)) <= set(
            np.round(np.interp(edges, [0, edges[-1]], levels[[0, -1], 0]), 1)
        )
        assert len(set(levels[:, 1])) == len(set(steps))
    assert dict(page.tables["Configuration"])["num_prompts"] == "37"
    assert dict(page.tables["Versions"])["sglang"] == version("sglang")


def test_a_check_shows_each_verdict(calibration: Path, calibration_page: Page) -> None:
    page = calibration_page
    checks = json.loads((calibration / "check.json").read_text())["checks"]
    assert [check["schedule"] for check in checks] == [f"m-{target}" for target in TARGETS]
    for check in checks:
        shown = page.records(f"Checked bins of {check['schedule']}")
        assert [row["verdict"] for row in shown] == [row["verdict"] for row in check["bins"]]
        words = "holds" if check["holds"] else "does not hold"
        assert f"{check['schedule']} {words}" in page.facts["verdict"]


def write_seeds(folder: Path, values: dict[str, list[float]]) -> None:
    """Runs of ten steps by learning rate and seed, whose last two rewards have the given mean."""
    for rate, means in values.items():
        for seed, mean in enumerate(means):
            place = folder / f"lr{rate}-{seed}"
            place.mkdir(parents=True)
            own = {"run_dir": str(place), "seed": seed, "optimizer": {"lr": rate}}
            # Settings of a part that is off make no arm.
            config = {"model": {"path": "m"}, "distill": {"enabled": False, "lr": seed}, **own}
            start = {"step": 0, "config": config, "device": "NVIDIA H100", "commit": "abc"}
            (place / "run.json").write_text(json.dumps({"starts": [start]}))
            rewards = [0.0] * 8 + [mean - 0.1, mean + 0.1]
            rows = [
                {
                    "step": step,
                    "critic/score/mean": reward,
                    "timing_s/rollout": 0.5,
                    "timing_s/step": 1.0,
                }
                | ({"eval/pass_rate": reward - 0.25} if step in (4, 9) else {})
                for step, reward in enumerate(rewards)
            ]
            (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_compared_over_their_seeds(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", {"1e-6": [0.5, 0.6, 0.7], "3e-6": [0.7, 0.9, 1.1]})
    page = report(tmp_path / "runs", tmp_path / "r.html")
    assert page.sections == ["comparison", *["training"] * 6]
    arms = ("optimizer.lr=1e-6", "optimizer.lr=3e-6")
    heads, *rows = page.tables["At the end, by arm (runs)"]
    assert heads == ["", f"{arms[0]} (3)", f"{arms[1]} (3)"]
    # Student's t for two degrees of freedom is 4.303: 4.303 * 0.1 / sqrt(3) and twice that.
    assert next(row for row in rows if row[0] == "reward") == ["reward", "0.6 ± 0.25", "0.9 ± 0.5"]
    # Welch: sqrt(0.01 / 3 + 0.04 / 3) = 0.1291; 0.05^2 / (0.01^2 + 0.04^2) * 2 = 2.94 degrees of
    # freedom, for which t lies between 3.182 (3) and 4.303 (2).
    (reward,) = [
        row for row in page.tables[f"Difference from {arms[0]}, at the end"] if row[0] == "reward"
    ]
    value, _, half = reward[1].partition(" ± ")
    assert value == "0.3" and 0.1291 * 3.182 < float(half) < 0.1291 * 3.5
    # The same over all ten steps, eight of which have a reward of 0.
    assert ["reward", "0.12 ± 0.05", "0.18 ± 0.099"] in page.tables["Over the run, by arm (runs)"]
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.json")]) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    [made_by] = content["made_by"]
    assert (made_by["device"], made_by["commit"]) == ("NVIDIA H100", "abc")
    assert content["settings"] == {"model.path": "m", "distill.enabled": "False"}
    first, second = content["arms"]
    assert (second["arm"], second["seeds"], second["steps"]) == (arms[1], [0, 1, 2], [9, 9, 9])
    gap = second["critic/score/mean - eval/pass_rate"]["over the run"]
    assert gap["values"] == pytest.approx([0.25] * 3)
    found = second["critic/score/mean"]["at the end"]
    assert found["values"] == pytest.approx([0.7, 0.9, 1.1])
    assert found["mean"]["value"] == pytest.approx(0.9)
    assert found["difference"] == pytest.approx({"value": 0.3, "half": float(half)}, rel=0.02)
    assert first["critic/score/mean"]["at the end"]["difference"] is None
    means = [(step, 0.0) for step in range(8)] + [(8, 0.5), (9, 0.7)]
    assert is_affine(page.curve("Reward, by arm", 0)[:10], means)


def test_runs_are_compared_over_the_steps_that_all_have_taken(tmp_path: Path, capsys: Any) -> None:
    write_seeds(tmp_path / "runs", {"1e-6": [0.5], "3e-6": [0.7]})
    short = next(iter(sorted((tmp_path / "runs").iterdir())))
    metrics = short / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:6]))
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.json")]) == 0
    assert f"left out: steps after 5, the last one of {short}" in capsys.readouterr().out
    arms = json.loads((tmp_path / "r.json").read_text())["arms"]
    assert [arm["steps"] for arm in arms] == [[5], [5]]


def test_one_run_of_each_arm_has_no_interval(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", {"1e-6": [0.5], "3e-6": [0.7]})
    page = report(tmp_path / "runs", tmp_path / "r.html")
    assert ["reward", "0.5", "0.7"] in page.tables["At the end, by arm (runs)"]
    assert "NaN" not in page.html


def test_many_runs_are_compared_without_a_section_each(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", {"1e-6": [0.5, 0.6, 0.7, 0.8], "3e-6": [0.7, 0.9, 1.1, 1.2]})
    (tmp_path / "runs" / "new").mkdir()
    (tmp_path / "runs" / "new" / "metrics.jsonl").touch()
    page = report(tmp_path / "runs", tmp_path / "r.html")
    assert page.sections == ["comparison"] and page.facts["runs"] == "8"
    assert "new/metrics.jsonl: holds no training step yet" in page.html


def test_several_kinds_have_a_section_each(run: Path, calibration: Path, tmp_path: Path) -> None:
    everything = tmp_path / "all"
    shutil.copytree(run, everything / "runs" / "a")
    shutil.copytree(run, everything / "runs" / "b")
    shutil.copytree(calibration, everything / "calibrated")
    (everything / "package.json").write_text('{"name": "of something else"}')
    page = report(everything, tmp_path / "r.html")
    assert page.sections == ["comparison", "training", "training", "calibration", "check"]
    assert "Left out" not in page.html


def test_a_shipped_schedule_shows_its_budgets(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "sparrow_sglang" / "schedules" / "qwen3-4b-0.86.json"
    page = report(path, tmp_path / "r.html")
    shown = [value(row["KV budget"]) for row in page.records("Budgets")]
    assert shown == json.loads(path.read_text())["budget_tokens"]
    assert page.facts["tail target"] == "0.86"


# -- what happens to runs and files


def test_a_row_that_a_kill_has_cut_is_left_out(run: Path, tmp_path: Path) -> None:
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(rows[:3]) + rows[3][:50])
    page = report(tmp_path, tmp_path / "r.html")
    assert [row["step"] for row in page.records("Steps")] == ["0", "1", "2"]


def test_a_run_of_one_step_and_a_long_one(tmp_path: Path) -> None:
    write_run(tmp_path / "short", 1)
    assert len(report(tmp_path / "short", tmp_path / "r.html").records("Steps")) == 2
    write_run(tmp_path / "long", 100)
    page = report(tmp_path / "long", tmp_path / "r.html")
    steps = [int(row["step"]) for row in page.records("Steps, 40 of 101")]
    assert (len(steps), steps[0], steps[-1]) == (40, 0, 100)


def test_alarms_and_skipped_steps_are_facts_of_a_run(run_page: Page, tmp_path: Path) -> None:
    assert not any("ALARM" in fact or "skipped" in fact for fact in run_page.facts)
    write_run(tmp_path, 14)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:14]:
        row["sparrow/collapse_alarm"] = float(row["step"] >= 11)
        row["actor/skipped_steps"] = float(row["step"] == 4) * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = report(tmp_path, tmp_path / "r.html").facts
    assert facts["ALARM, the policy may be collapsing"] == "3 steps, the first is 11"
    assert facts["optimizer steps skipped, gradient not finite"] == "2"


def test_what_is_damaged_is_left_out_by_name(run: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copy(run / "metrics.jsonl", tmp_path)
    (tmp_path / "cut.json").write_text('{"rows": [')
    (tmp_path / "half.json").write_text('{"checks": [{"schedule": "x"}]}')
    bins = {"page_size": 16, "bin_tokens": 64, "budget_tokens": [7]}
    (tmp_path / "s.json").write_text(json.dumps({"name": "s"} | bins))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n')
    page = report(tmp_path, tmp_path / "r.html")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert page.sections == ["training"] and len(told) == 4
    for name in (
        "cut.json",
        "half.json: lacks 'settings'",
        "/s.json: budget_tokens[0]=7",
        ":2: 'nons",
    ):
        assert sum(name in line for line in told) == 1, name


def test_names_are_text_and_never_markup(calibration: Path, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&"
    schedule = BudgetSchedule.from_json(calibration / f"m-{TARGETS[0]}.json")
    schedule.model_copy(update={"model": evil}).save(tmp_path / "s.json")
    page = report(tmp_path, tmp_path / "r.html")
    assert "<script" not in page.html and "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page.html


def test_ids_are_unique_and_nothing_is_loaded(calibration_page: Page) -> None:
    html = calibration_page.html
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids)) > 100
    for used in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', html):
        assert (used[0] or used[1]) in ids
    assert not re.search(r"https?:|//|@import|<link|<script|\bsrc=", html.replace("</", ""))


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("gone", [], "gone: no such file or folder; expected the metrics.jsonl of a training run"),
        ("empty", [], "empty: nothing to report on; looked for the metrics.jsonl of a training"),
        ("work", [], "work holds measurements of a calibration"),
        ("new", [], "metrics.jsonl: holds no training step yet"),
        ("binary", [], "metrics.jsonl:1: "),
        ("text.json", [], "text.json: cannot be read as JSON"),
        ("run", ["--out", "run.txt"], "--out run.txt: expected a name that ends in .html"),
        ("run", ["--out", "run.json"], "compares runs: expected two or more, got 1"),
        ("run", ["--out", "run/metrics.jsonl/r.html"], "cannot be written"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(
    name: str,
    more: list[str],
    message: str,
    run: Path,
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "metrics.jsonl").write_bytes(b"\xd9\x00\n")
    (tmp_path / "text.json").write_text("text")
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(calibration / "work", tmp_path / "work")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    # What threads of earlier tests may still have written.
    capsys.readouterr()
    assert cli.main(["report", name, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparrow report: error: ") and error.count("\n") == 1
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'sparrow-sglang[report]'" in line
