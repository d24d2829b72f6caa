"""`sparrow report`: what it shows is what the files hold, and wrong input is one line."""

import json
import re
import shutil
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ascii_task
import numpy as np
import pytest
from task_files import jsonl

from sparrow_sglang.commands import cli
from sparrow_sglang.report.compare import compare
from sparrow_sglang.report.sources import find_sources
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.metrics import acceptance_metrics
from sparrow_sglang.rl.runs.log import RunLog
from sparrow_sglang.rl.runs.run import record_start
from sparrow_sglang.run_folder import RESPONSES_FILE
from sparrow_sglang.schedules.names import load_schedule

STEPS = 12
ROOT = Path(__file__).parents[3]
MODEL, TARGETS = "smollm2-135m", ("0.75", "0.86", "0.92")
SCHEDULE = f"{MODEL}-0.86"
CHECK = ROOT / "benchmarks" / "results" / "h200" / f"calibration_check_{MODEL}.json"


def write_run(folder: Path, steps: int) -> None:
    """A run of `steps` steps under a schedule for a tail of 0.86."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TrainConfig.parse(
        {
            "run_dir": folder,
            "steps": steps,
            "task": {"name": "story"},
            "rollout": {"max_new_tokens": 3000},
            "engine": {"schedule": SCHEDULE},
            "logging": {"tensorboard": False},
        }
    )
    record_start(config, config.engine, 0, load_schedule(SCHEDULE, 16))
    log = RunLog(config, 0)
    for step in range(steps):
        if step % 4 == 0:
            log.write_evaluation(step, {"eval/pass_rate": 0.3 + 0.02 * step}, [])
        log.append(RESPONSES_FILE, step, responses(step))
        log.write(step, step_metrics(step))
    log.write_evaluation(steps, {"eval/pass_rate": 0.75}, [])
    log.close()


def responses(step: int) -> list[dict[str, Any]]:
    """A group of four responses; the last one could not be scored."""
    group = {"task": "story", "prompt_id": f"p{step}", "prompt": f"Tell story {step}."}
    group |= {"scores": {}, "length": 1000, "finish_reason": "stop"}
    group["text"] = "<b>once" + " upon a time" * 1000
    rewards = enumerate((0.5, 1.0, 0.0, None))
    return [group | {"sample": sample, "reward": reward} for sample, reward in rewards]


def step_metrics(step: int) -> dict[str, float]:
    draw = np.random.default_rng(step)
    return {
        "critic/score/mean": 0.3 + 0.01 * step,
        "response_length/mean": 900.0 + 10 * step,
        "response_length/max": 1800.0 + 20 * step,
        "response_length/clip_ratio": 0.25,
        **acceptance_metrics(1 - draw.beta(1, 8, 400), np.arange(400) // 200),
        "sparrow/kv_tokens_read": 500.0 + step,
        "sparrow/kv_tokens_cached": 1100.0 + step,
        "sparrow/rollout_tokens_per_s": 1000.0 + step,
        "timing_s/step": 15.0 + draw.random(),
    }


class Page(HTMLParser):
    """Tables by title, series of each chart, facts, and kinds of sections of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tables: dict[str, list[list[str]]] = {}
        self.charts: dict[str, int] = {}
        self.facts: dict[str, str] = {}
        self.sections: list[str] = []
        self._text = self._title = self._fact = self._chart = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._text = ""
        if "-series-" in (dict(attrs).get("id") or ""):
            self.charts[self._chart] += 1
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag == "section":
            self.sections.append(dict(attrs)["data-kind"] or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._chart = self._text
            self.charts[self._chart] = 0
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


def report(path: Path, out: Path) -> Page:
    assert cli.main(["report", str(path), "--out", str(out)]) == 0
    return Page(out.read_text("utf-8"))


def value(cell: str) -> float:
    return float(cell.replace(",", ""))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "story"
    write_run(folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def run_page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(run, tmp_path_factory.mktemp("page") / "r.html")


def test_a_run_says_what_its_metrics_say(run: Path, run_page: Page) -> None:
    page, rows = run_page, ascii_task.rows(run)
    shown = page.records("Steps")
    assert [row["step"] for row in shown] == [str(row["step"]) for row in rows]
    for cells, row in zip(shown[:STEPS], rows, strict=False):
        for head, name in [
            ("reward", "critic/score/mean"),
            ("length", "response_length/mean"),
            ("tail", "sparrow/accept_p05"),
            ("KV read", "sparrow/kv_tokens_read"),
            ("seconds", "timing_s/step"),
        ]:
            assert value(cells[head]) == pytest.approx(row[name], rel=6e-4), (head, row["step"])
        rate = row.get("eval/pass_rate")
        assert cells["pass rate"] == ("–" if rate is None else f"{rate:.3g}")
    assert (shown[-1]["reward"], shown[-1]["pass rate"]) == ("–", "0.75")
    assert page.facts["steps"] == f"{STEPS} of {STEPS}"
    configuration = dict(page.tables["Configuration"])
    assert configuration["rollout.max_new_tokens"] == "3000"
    assert configuration["engine.schedule"] == SCHEDULE
    assert dict(page.tables["Versions"])["sglang"] == version("sglang")
    charts = {"Reward": 2, "Response length": 2, "Acceptance rate of the rollouts": 2}
    assert page.charts.items() >= charts.items()


def test_the_best_and_the_worst_response_of_some_steps_are_shown_by_their_ends(
    run_page: Page,
) -> None:
    shown = re.findall(r"Step (\d+), story/p\d+, reward ([\d.]+), tail", run_page.html)
    assert shown == [(step, reward) for step in ("0", "4", "7", "11") for reward in ("1", "0")]
    assert run_page.html.count("&lt;b&gt;once upon") == run_page.html.count("[… 6,007 ch") == 8


def test_a_calibration_says_what_its_schedules_say(tmp_path: Path) -> None:
    """With its check on other prompts."""
    for path in (*(ROOT / "sparrow_sglang" / "schedules").glob(f"{MODEL}-0.*.json"), CHECK):
        shutil.copy(path, tmp_path)
    page = report(tmp_path, tmp_path / "r.html")
    # A calibration is one section whatever the number of targets; its check is another.
    assert page.sections == ["calibration", "check"]
    tails: Any = load_schedule(SCHEDULE, 16).provenance["tails"]
    for cells in page.records("Tail by budget and position"):
        measured = {row["bin"]: row["tail"] for row in tails[cells["KV budget"].replace(",", "")]}
        for index, tail in measured.items():
            span = f"{index * 512:,}–{(index + 1) * 512 - 1:,}"
            assert value(cells[span]) == pytest.approx(tail, abs=6e-5)
    for target in TARGETS:
        schedule = load_schedule(f"{MODEL}-{target}", 16)
        bins: Any = schedule.provenance["bins"]
        shown = page.records(f"Bins of {MODEL}-{target}")
        assert [value(row["budget"]) for row in shown] == list(schedule.budget_tokens)
        assert [row["basis"] for row in shown] == [row["basis"] for row in bins]
    assert page.charts["KV budget by length"] == len(TARGETS)
    assert dict(page.tables["Configuration"])["num_prompts"] == "381"


def test_names_are_text_ids_are_unique_and_nothing_is_loaded(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&"
    schedule = load_schedule(SCHEDULE, 16)
    schedule.model_copy(update={"model": evil}).save(tmp_path / "s.json")
    html = report(tmp_path, tmp_path / "r.html").html
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids)) > 50
    for used in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', html):
        assert (used[0] or used[1]) in ids
    assert not re.search(r"https?:|//|@import|<link|\bsrc=", html.replace("</", ""))


# -- several runs


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
                {"step": step, "critic/score/mean": reward, "timing_s/step": 1.0}
                | ({"eval/pass_rate": reward - 0.25} if step in (4, 9) else {})
                for step, reward in enumerate(rewards)
            ]
            jsonl(place / "metrics.jsonl", rows)


def test_runs_are_compared_over_their_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_seeds(tmp_path / "runs", {"1e-6": [0.5, 0.6, 0.7], "3e-6": [0.7, 0.9, 1.1]})
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["A: optimizer.lr=1e-6 (3 runs)", "B: optimizer.lr=3e-6 (3 runs)"]
    # Student's t for two degrees of freedom is 4.303: 4.303 * 0.1 / sqrt(3) and twice that.
    rows = [re.split(r"\s\s+", line) for line in shown]
    assert ["reward", "0.6 ± 0.25", "0.9 ± 0.5"] in rows
    content = json.loads((tmp_path / "r.json").read_text())
    made_by = {"device": "NVIDIA H100", "python": None, "packages": None, "commit": "abc"}
    assert content["made_by"] == [made_by]
    assert content["settings"] == {"model.path": "m", "distill.enabled": "False"}
    first, second = content["arms"]
    found = second["critic/score/mean"]["at the end"]
    assert found["values"] == pytest.approx([0.7, 0.9, 1.1])
    # Welch: variances 0.01 / 3 and 0.04 / 3, freedom 2.94, quantile 3.22.
    assert found["difference"] == pytest.approx({"value": 0.3, "half": 0.4157}, rel=0.01)
    assert first["critic/score/mean"]["at the end"]["difference"] is None
    gap = second["critic/score/mean - eval/pass_rate"]["at the end"]["mean"]["value"]
    assert gap == pytest.approx(0.25)


def test_runs_are_compared_up_to_the_evaluation_after_the_last_step_of_all(tmp_path: Path) -> None:
    for steps in (4, 8):
        write_run(tmp_path / str(steps), steps)
    arms = compare(find_sources([tmp_path]))["arms"]
    assert [arm["steps"] for arm in arms] == [[4], [4]]
    assert [arm["eval/pass_rate"]["at the end"]["values"] for arm in arms] == [[0.75], [0.38]]
    rewards = [arm["critic/score/mean"]["over the run"]["values"] for arm in arms]
    assert rewards == [pytest.approx([0.315])] * 2


def test_runs_within_the_folder_of_a_run_are_found(run: Path, tmp_path: Path) -> None:
    for inside in (".", "again", "checkpoints/step-000001"):
        shutil.copytree(run, tmp_path / inside, dirs_exist_ok=True)
    assert find_sources([tmp_path]).runs == [tmp_path, tmp_path / "again"]


# -- rollouts


def rollout(side: str, seconds: Any, sequences: int = 3, **fields: Any) -> dict[str, Any]:
    schedule, backend = ("drafts", "sparrow") if side == "lossless" else (None, side)
    row = {"model": "qwen3-8b", "backend": backend, "schedule": schedule, "sequences": sequences}
    row |= {"drafts": "8"} if schedule else {}
    total = np.max(np.atleast_2d(seconds)[0])
    return row | {"longest": 4096, "tokens_per_s": 9 / total, "finished_s": seconds} | fields


def test_a_figure_of_a_rollout_has_a_line_of_running_sequences_for_each_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [rollout("slow", [9.0] * 3), rollout("fa3", [1.0, 2.0, 8.0])]
    rows += [rollout("lossless", [[3.0, 1.0, 4.0], [7.0, 7.0, 7.0]]), rollout("fa3", [9.0], 1)]
    rows.append(rollout("fa3", [0.5] * 3) | {"side": "ngram"})
    Path("r.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    assert cli.main(["report", "r.json"]) == 0
    assert capsys.readouterr().out == "rollout.svg\n"
    svg = Path("rollout.svg").read_text()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"stock SGLang (fa3), 8.0 s", "lossless, 4.0 s", "sequences still running"} <= {*texts}
    assert "qwen3-8b, 3 sequences of up to 4,096 tokens, NVIDIA H200" in texts and "slow" not in svg
    lines = {}
    for index in range(2):
        [path] = re.findall(rf'id="series-{index}">\s*<path d="([^"]*)"', svg)
        lines[index] = np.array([float(n) for n in re.findall(r"[\d.]+", path)]).reshape(-1, 2)
    # From the origin: seconds to the right, and three sequences, two, one and none downwards.
    second = (lines[0][-1, 0] - lines[0][0, 0]) / 8
    sequence = (lines[0][-1, 1] - lines[0][0, 1]) / 3
    for line, ends in zip(lines.values(), ([1, 2, 8], [1, 3, 4]), strict=True):
        x, y = (line - line[0]).T / np.array([[second], [sequence]])
        assert x == pytest.approx(np.repeat([0, *ends], 2)[1:], abs=1e-3)
        assert y == pytest.approx(np.repeat([0, 1, 2, 3], 2)[:-1], abs=1e-3)
    # It loads nothing, and is seen on white and on black.
    assert not re.search(r'href="[^#]|@import|url\([^#]', svg)
    assert "currentColor" not in svg and "#101010" not in svg
    # A result of one side.
    Path("r.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": rows[-1:]}))
    assert cli.main(["report", "r.json"]) == 0
    assert Path("rollout.svg").read_text().count('id="series-') == 1


# -- damaged files and wrong input


def test_what_is_damaged_is_left_out_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(run / "metrics.jsonl", tmp_path)
    (tmp_path / "cut.json").write_text('{"rows": [')
    (tmp_path / "half.json").write_text('{"checks": [{"schedule": "x"}]}')
    bins = {"name": "s", "page_size": 16, "bin_tokens": 64, "budget_tokens": [7]}
    (tmp_path / "s.json").write_text(json.dumps(bins))
    assert report(tmp_path, tmp_path / "r.html").sections == ["training"]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert len(told) == 3
    for name in ("cut.json", "half.json", "/s.json"):
        assert sum(name in line for line in told) == 1, name


def test_a_benchmark_that_cannot_be_reported_on_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for measured, out, message in (
        ("step_ms", [], "r.json: lacks 'schedule'; expected"),
        ("finished_s", [], "r.json: lacks 'sequences'; expected"),
        ("step_ms", ["--out", "r.html"], "--out r.html: steps are a table in the terminal"),
        ("seconds", [], "files of `sparrow bench step`, or one of `sparrow bench rollout`"),
    ):
        Path("r.json").write_text(json.dumps({"rows": [{measured: 1.0}]}))
        assert cli.main(["report", "r.json", *out]) == 2
        assert message in capsys.readouterr().err
    steps = json.loads((CHECK.with_name("steps-8b.json")).read_text())
    steps["rows"][-1] = next(row for row in steps["rows"] if "drafts" in row) | {"lookups": "x"}
    Path("r.json").write_text(json.dumps(steps))
    assert cli.main(["report", "r.json"]) == 2
    assert "report: error: r.json: " in capsys.readouterr().err
