"""The stability study: its task, how it pretrains, plans its runs, and judges what happened."""

import json
import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import curves
import graph_walk
import numpy as np
import pretraining
import pytest
import study
import summary
import torch
from graph_walk import WalkOptions
from scipy import stats
from stability_study import FOLDER, task_of, tiny
from study_settings import StudySettings

from sparrow_sglang.benchmarks.training.distill_result import PAIRS, gains
from sparrow_sglang.benchmarks.training.parallel_runs import RunPlan, run_all, toml_lines
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskConfig, TrainConfig
from sparrow_sglang.rl.tasks import load_task
from sparrow_sglang.schedule import BudgetSchedule

ROOT = FOLDER.parents[1]
OPTIONS = WalkOptions(
    degree=3, least_nodes=5, most_nodes=9, names=12, steps=14, train=20, heldout=10
)


def random_answer(prompt: list[str], draw: random.Random, steps: int) -> list[str]:
    """A random walk along the edges that the words of a prompt name; it needs nothing else."""
    *edges, _, at = prompt
    pairs = list(zip(edges[::3], edges[1::3], strict=True))
    words = []
    for _ in range(steps):
        following = draw.choice([b for a, b in pairs if a == at])
        words += [at, following, ";"]
        at = following
    return words[1:]


def test_prompts_hold_all_that_a_right_response_needs() -> None:
    task, tokenizer = task_of(OPTIONS)
    assert (len(task.train), len(task.heldout)) == (20, 10)
    draw = random.Random(1)
    for prompt in (*task.train, *task.heldout):
        words = tokenizer.decode(prompt.input_ids).split()
        assert len(words) == len(prompt.input_ids) <= OPTIONS.prompt_tokens()
        edges = {(a, b) for a, b in zip(words[:-2:3], words[1:-2:3], strict=True)}
        assert len(edges) == (len(words) - 2) // 3
        answer = random_answer(words, draw, OPTIONS.steps)
        assert task.reward(prompt, " ".join(answer)) == 1.0
        assert len(tokenizer(" ".join(answer)).input_ids) == OPTIONS.response_tokens()
    assert len({prompt.input_ids for prompt in (*task.train, *task.heldout)}) == 30
    fewer = task_of(OPTIONS.model_copy(update={"train": 3}))[0]
    assert fewer.heldout == task.heldout and fewer.train == task.train[:3]


def test_a_wrong_word_costs_the_lines_that_it_makes_wrong() -> None:
    task, tokenizer = task_of(OPTIONS)
    prompt, steps = task.train[0], OPTIONS.steps
    draw = random.Random(2)
    answer = random_answer(tokenizer.decode(prompt.input_ids).split(), draw, steps)
    edges = {tuple(edge) for edge in prompt.payload["edges"]}
    for place in range(len(answer)):
        wrong = list(answer)
        wrong[place] = "n11" if answer[place] != "n11" else "n10"
        # The first word of a response is the second of a line.
        lost = 1
        if place % 3 == 0:
            # Another node that an edge leads to is right in this line, but the next starts wrong.
            source = answer[place - 1] if place else prompt.payload["start"]
            lost = ((source, wrong[place]) not in edges) + (place < len(answer) - 2)
        elif place % 3 == 1:
            # Without its separator a line merges with the next one, if there is one.
            lost = 1 + (place < len(answer) - 1)
        assert task.reward(prompt, " ".join(wrong)) == (steps - lost) / steps, place
    for kept in range(len(answer)):
        share = (kept + 2) // 3 / steps
        assert task.reward(prompt, " ".join(answer[:kept])) == share
    assert task.reward(prompt, " ".join([*answer, "n1"])) == 1.0
    # The first line misses its end, and where the second starts follows from it.
    assert task.reward(prompt, " ".join(answer[1:])) == (steps - 2) / steps
    assert task.reward(prompt, "; " * steps) == 0.0


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "graph_walk:loud",
            r"task\.name='graph_walk:loud': graph_walk has no function 'loud'; .*load",
        ),
        ("no_such_module:load", r"task\.name='no_such_module:load': No module .*PYTHONPATH"),
        (":load", r"task\.name=':load': .*expected module:function"),
    ],
)
def test_tasks_that_cannot_be_imported_are_refused(name: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        load_task(TaskConfig(name=name), lambda messages: (1,))


def test_options_that_no_graph_fits_are_refused() -> None:
    config = TaskConfig(name="graph_walk:load", options=OPTIONS.model_dump() | {"names": 8})
    with pytest.raises(InputError, match=r"task\.options\.names=8 is not allowed: .*most_nodes"):
        load_task(config, lambda messages: (1,))


def test_pretraining_learns_and_says_when_it_has_not_learnt_enough(tmp_path: Path) -> None:
    settings = tiny(
        walk={"degree": 1, "least_nodes": 2, "most_nodes": 2, "names": 4, "steps": 3, "heldout": 8},
        model__num_hidden_layers=3,
        pretrain__steps=300,
        pretrain__tokens_per_step=300,
        pretrain__evaluate_every=10,
        pretrain__evaluate_lines=2,
        pretrain__grow_below=0.4,
        pretrain__reward=0.5,
    )
    record = pretraining.pretrain(settings, tmp_path / "model")
    rows = record["history"]
    assert rows[-1]["reward"] >= 0.5 > rows[0]["reward"]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["step"] < 300
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # What is saved is what was trained, with the tokenizer that goes with it.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    task, _ = task_of(settings.walk)
    passed = 0
    for prompt in task.heldout:
        ids = torch.tensor([prompt.input_ids])
        found = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(found, skip_special_tokens=True)
        passed += int(task.reward(prompt, text))
    assert passed >= len(task.heldout) / 2
    # For walks of one line and a less certain model, the sampled reward is the probability of the
    # line's two tokens, for prompts with and without padding.
    with torch.no_grad():
        model.get_output_embeddings().weight *= 0.4
    walks = [
        graph_walk.draw_walk(random.Random(3), settings.walk, nodes, 1, 3) for nodes in (1, 2)
    ] * 300
    masses = []
    for walk in walks[:2]:
        ids = tokenizer(f"{walk.prompt()} {walk.lines[0][1]} ;", return_tensors="pt").input_ids
        with torch.no_grad():
            scores = model(ids).logits[0].log_softmax(-1)
        masses.append(float((scores[-3, ids[0, -2]] + scores[-2, ids[0, -1]]).exp()))
    torch.manual_seed(0)
    found = pretraining.sampled_reward(model, tokenizer, walks, 1)
    mean = sum(masses) / 2
    assert 0.1 < mean < 0.9 and abs(found - mean) < 4 * (mean * (1 - mean) / 600) ** 0.5
    with pytest.raises(InputError, match=r"pretrain\.steps=3: the reward is 0\.0\d+ after"):
        hasty = settings.pretrain.model_copy(update={"steps": 3})
        pretraining.pretrain(settings.model_copy(update={"pretrain": hasty}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_every_run_is_an_ordinary_configuration(scale: str, tmp_path: Path) -> None:
    settings = StudySettings.load(FOLDER / "study.toml", scale)
    files = {
        f"calibrated-{target}": tmp_path / f"{target}.json"
        for target in settings.calibration.targets
    }
    plans = settings.plan_runs(tmp_path / "model", files, tmp_path / "runs")
    assert [(plan.arm, plan.seed) for plan in plans] == [
        (arm, seed)
        for seed in settings.seeds
        for arm, how in settings.arms.items()
        if how.seeds is None or seed in how.seeds
    ]
    for plan in plans:
        file = plan.beside(".toml")
        file.parent.mkdir(exist_ok=True)
        assert not file.exists()
        file.write_text("\n".join(toml_lines(plan.values)))
        assert TrainConfig.load(file) == plan.config
        how = settings.arms[plan.arm]
        assert plan.config.engine.schedule == str(files.get(how.schedule, how.schedule))
        assert plan.config.distill.enabled == how.distill
        assert plan.config.algorithm.correction == (how.correction or "tis")
        longest = plan.config.rollout.max_prompt_tokens + plan.config.rollout.max_new_tokens
        assert longest < settings.context_tokens
    starts = {
        plan.config.model_copy(update={"run_dir": Path("x")}).model_dump_json() for plan in plans
    }
    assert len(starts) == len(plans)


def test_a_study_goes_on_with_its_own_settings_and_further_seeds_and_arms(tmp_path: Path) -> None:
    file = tmp_path / "results" / "settings.json"
    arms = {"dense": {"schedule": "dense"}}
    study._own(file, tiny(arms=arms))
    more = {"dense": {"schedule": "dense", "seeds": (0,)}, "fixed-64": {"schedule": "fixed-64"}}
    study._own(file, tiny(parallel=7, seeds=(0, 1), arms=more))
    assert json.loads(file.read_text())["seeds"] == [0, 1]
    assert [*json.loads(file.read_text())["arms"]] == ["dense", "fixed-64"]
    with pytest.raises(InputError, match=r"walk=.*'steps': 40.* was begun with .*--out"):
        study._own(file, tiny(arms=more, walk__degree=3))
    for others in (arms, more | {"fixed-64": {"schedule": "fixed-128"}}):
        with pytest.raises(InputError, match=r"arms=.* was begun with .*'fixed-64'"):
            study._own(file, tiny(arms=others))


def test_only_the_runs_of_the_given_arms_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def train(plans: Sequence[RunPlan], *_: Any) -> None:
        started.extend(plan.name for plan in plans)
        for plan in plans:
            plan.config.run_dir.mkdir(parents=True)
            rows = metrics([0.4, 0.6], None, steps=plan.config.steps)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (plan.config.run_dir / "metrics.jsonl").write_text(text)

    stages: list[str] = []
    monkeypatch.setattr(study, "make_model", lambda *_: None)
    for stage in ("calibrate", "distil"):
        monkeypatch.setattr(study, stage, lambda *_, name=stage: stages.append(name))
    monkeypatch.setattr(study, "run_all", train)
    command = ["--scale", "tiny", "--out", str(tmp_path), "--arms"]
    assert study.main([*command, "distilled-0.4"]) == 0
    assert stages == ["calibrate"]
    # The summary covers only the arms that have run.
    assert started == ["distilled-0.4-seed0"]
    assert [*summary.load_runs(tmp_path / "results")] == ["distilled-0.4"]
    assert study.main([*command, "dense"]) == 0
    assert stages == ["calibrate"]
    assert [*summary.load_runs(tmp_path / "results")] == ["dense", "distilled-0.4"]
    assert study.main([*command, "sparse"]) == 2
    assert "--arms sparse: expected some of dense, distilled-0.4" in capsys.readouterr().err
    monkeypatch.setattr(study, "run_all", lambda *_: None)
    assert study.main(command[:-1]) == 0
    assert stages == ["calibrate", "calibrate", "distil"]


def test_a_study_that_is_asked_to_end_says_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sigterm_restored: None,
) -> None:
    def terminated(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    # Ctrl-C raises this, except in a shell's background jobs, which ignore the signal.
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for stop, code in ((terminated, 143), (interrupted, 130)):
        monkeypatch.setattr(study, "study", stop)
        assert study.main(["--scale", "tiny", "--out", str(tmp_path)]) == code
        assert capsys.readouterr().err == "study: stopped; repeat the command to go on\n"


def test_a_run_is_complete_with_its_last_evaluation(tmp_path: Path) -> None:
    plan = tiny(arms={"dense": {"schedule": "dense"}}).plan_runs(tmp_path, {}, tmp_path)[0]
    assert not plan.is_complete()
    plan.config.run_dir.mkdir()
    file = plan.config.run_dir / "metrics.jsonl"
    for text, complete in (
        ('{"step": 0}\n{"step": 2}\n', False),
        # The run was killed in the middle of writing its last row.
        ('{"step": 2}\n{"step": 3, "eval', False),
        ('{"step": 2}\n{"step": 3, "eval/pass_rate": 0.1}\n', True),
    ):
        file.write_text(text)
        assert plan.is_complete() == complete
    # A complete run is not started.
    run_all([plan], 1, [FOLDER])
    assert not file.with_name("dense-seed0.log").exists()


def test_a_wrong_setting_of_the_runs_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    text = (FOLDER / "study.toml").read_text()
    file = tmp_path / "study.toml"
    file.write_text(text.replace("lr = 1e-4", "lr = -1.0", 1))
    monkeypatch.setattr(study, "SETTINGS", file)
    monkeypatch.setattr(study, "pretrain", lambda *_: pytest.fail("pretraining has started"))
    assert study.main(["--scale", "tiny", "--out", str(tmp_path / "out")]) == 2
    assert "optimizer.lr=-1.0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_settings_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    text = (FOLDER / "study.toml").read_text()
    file = tmp_path / "study.toml"
    for old, new, match in (
        (
            'schedule = "calibrated-0.4"',
            'schedule = "calibrated-0.9"',
            r"arms\.distilled-0\.4\.schedule='calibrated-0\.9': .*0\.75",
        ),
        (
            '"calibrated-0.75", "calibrated-0.4"',
            '"calibrated-0.75", "calibrated-0.3"',
            r"distillation\.schedules\[1\]='calibrated-0\.3': .*0\.75",
        ),
        ("max_total_tokens", "max_tokens", r"\[tiny\.server_args\] max_tokens .*'max_total_t"),
        ("names = 32", "names = 8", r"tiny\.walk\.names=8 is not allowed: .*most_nodes"),
        ("evaluate_lines = 40", "evaluate_lines = 41", r"evaluate_lines=41: .*walk\.steps=40"),
        (
            'dense = { schedule = "dense" }',
            'dense = { schedule = "dense", seeds = [3] }',
            r"arms\.dense\.seeds: 3 is none of seeds=\[0\]",
        ),
        (
            "bin_tokens = 128",
            "bin_tokens = 100",
            r"tiny\.calibration\.bin_tokens=100 .*multiple of 16",
        ),
        ("lr = 4e-3", "rate = 4e-3", r"\[tiny\.pretrain\] unknown key 'rate': .*lr"),
    ):
        assert old in text
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(InputError, match=match):
            StudySettings.load(file, "tiny")
    with pytest.raises(InputError, match=r"--scale huge: .* it has tiny, full"):
        StudySettings.load(FOLDER / "study.toml", "huge")


def metrics(
    passes: list[float], tail: float | None, steps: int = 20, reward: float = 0.4
) -> list[dict[str, float]]:
    """Rows of a run that is evaluated at even distances, the last time after its last step."""
    rows: list[dict[str, float]] = []
    for step in range(steps + 1):
        row: dict[str, float] = {"step": step}
        if step < steps:
            row |= {summary.REWARD: reward + 0.01 * step, summary.LENGTH: 100.0 + step}
            row |= {summary.KL: 0.001}
            if tail is not None:
                row |= {f"{summary.TAIL_OF_BIN}0": tail, f"{summary.TAIL_OF_BIN}1": tail - 0.01}
        every = steps // (len(passes) - 1)
        if step % every == 0:
            row |= {summary.PASS_RATE: passes[step // every], f"{summary.PASS_RATE}_stderr": 0.04}
        rows.append(row)
    return rows


def curve(*rates: float, every: int = 1, stderr: float = 0.02) -> list[summary.Evaluation]:
    return [summary.Evaluation(every * k, rate, stderr) for k, rate in enumerate(rates)]


def test_slopes_are_those_of_least_squares_over_the_last_third() -> None:
    # The last third has steps 20 and 30: 0.1 in 10 steps, with errors of 0.03 and 0.04.
    points = [
        summary.Evaluation(step, rate, stderr)
        for step, rate, stderr in ((0, 0.9, 0.1), (10, 0.1, 0.1), (20, 0.5, 0.03), (30, 0.6, 0.04))
    ]
    assert summary.last_slope(points) == pytest.approx((0.01, 0.005, 10))
    draw = np.random.default_rng(0)
    steps = np.arange(0, 151, 3)
    rates, stderrs = draw.uniform(0.2, 0.8, len(steps)), draw.uniform(0.01, 0.03, len(steps))
    points = [*map(summary.Evaluation, steps.tolist(), rates, stderrs)]
    x, y = steps[steps >= 100], rates[steps >= 100]
    slope = summary.last_slope(points)
    assert (slope.value, slope.steps) == pytest.approx((stats.linregress(x, y).slope, 48))
    # The slopes of rates that are drawn with these errors scatter by the standard error.
    drawn = draw.normal(y, stderrs[steps >= 100], (20_000, len(y)))
    assert np.polyfit(x, drawn.T, 1)[0].std() == pytest.approx(slope.stderr, rel=0.03)
    with pytest.raises(ValueError, match="1 evaluations: expected 2"):
        summary.last_slope(points[:1])
    # A run so short that its last third holds one evaluation.
    assert summary.last_slope(curve(0.4, 0.6)).value == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("points", "falling"),
    [
        (curve(0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), True),
        # The rate falls before the last third and stays constant in it.
        (curve(0.9, 0.5, 0.1, 0.0, 0.0, 0.0, 0.0), False),
        (curve(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), False),
        # A fall of 0.08 is within two standard errors of 0.05 * sqrt(2).
        (curve(0.9, 0.5, 0.5, 0.5, 0.54, 0.5, 0.46, stderr=0.05), False),
        # A fall of 0.04 is clear, but too small to count.
        (curve(0.9, 0.5, 0.5, 0.5, 0.04, 0.02, 0.0, stderr=0.001), False),
    ],
)
def test_a_run_is_falling_where_its_slope_is_clear_and_large_enough(
    points: list[summary.Evaluation], falling: bool
) -> None:
    assert summary.last_slope(points).falling == falling


def test_differences_are_those_of_the_same_seed_after_the_same_steps() -> None:
    runs = {
        0: metrics([0.4, 0.5, 0.6], 0.9),
        # Evaluated every 5 steps, and cut after step 15; dense after 0, 10 and 20.
        1: metrics([0.4, 0.9, 0.3, 0.9, 0.7], 0.9)[:16],
        2: metrics([0.4, 0.5, 0.6], 0.9),
    }
    dense = {
        0: metrics([0.4, 0.7, 0.9], None),
        1: metrics([0.5, 0.7, 0.9], None),
        3: metrics([0.4, 0.5, 0.6], None),
    }
    differences = summary.paired_differences(runs, dense)
    assert differences == {0: pytest.approx((-0.5 / 3, -0.3)), 1: pytest.approx((-0.25, -0.4))}


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_intervals_are_those_of_a_paired_t_test(seeds: int) -> None:
    draw = np.random.default_rng(seeds)
    arm, dense = draw.uniform(0, 1, (2, seeds))
    known = stats.ttest_rel(arm, dense).confidence_interval(summary.CONFIDENCE)
    found = summary.paired_interval((arm - dense).tolist())
    assert found == pytest.approx((known.low, known.high))


def test_cells_hold_intervals_where_there_are_seeds_enough() -> None:
    # t of 0.975 with one degree of freedom is 12.706, and the standard error 0.01.
    assert summary.with_interval([-0.21, -0.19]) == "-0.200 [-0.327, -0.073]"
    assert summary.with_interval([0.25]) == "+0.250"
    assert summary.with_interval([]) == "–"


def test_a_row_of_the_summary_shows_each_run() -> None:
    runs = {seed: metrics([0.4, 0.6, 0.8 - 0.5 * seed], 0.9) for seed in (0, 1)}
    # The reward falls from 0.49 at step 9 to 0.2 at step 10, then goes on as without the fall.
    runs[1][10][summary.REWARD] = 0.2
    # The lowest tail is that of the worst part of the worst run; a single step is noise.
    for step in (6, 7):
        runs[1][step][f"{summary.TAIL_OF_BIN}0"] = 0.5
    runs[1][12][f"{summary.TAIL_OF_BIN}1"] = 0.2
    dense = {seed: metrics([0.4, 0.6, 0.9], None) for seed in (0, 1)}
    assert summary.arm_cells("x", runs, dense) == {
        "arm": "x",
        "pass rate, first": "0.400",
        "last, by seed": "0.800, 0.300",
        # Means of -0.1 / 3 and -0.6 / 3, and of -0.1 and -0.6.
        "area to dense": "-0.117 [-1.176, +0.942]",
        "last to dense": "-0.350 [-3.527, +2.827]",
        "falling": "1 of 2",
        "reward, first → last": "0.405 → 0.585",
        "largest fall, by seed": "0%, 59%",
        "length, first → last": "100 → 118",
        "lowest tail by bin": "0.500, 0.545",
        "median": "0.900, 0.890",
        "median KL": "0.001",
    }
    cells = summary.arm_cells("dense", dense, dense)
    for empty in ("area to dense", "last to dense", "lowest tail by bin", "median"):
        assert cells[empty] == "–"


def test_the_summary_is_made_from_the_results_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    arms = ("dense", "small", "small-mask", "not run")
    (tmp_path / "settings.json").write_text(json.dumps({"arms": dict.fromkeys(arms, {})}))
    with pytest.raises(InputError, match="no metrics of any arm"):
        summary.write_summary(tmp_path)
    for arm in arms[:3]:
        for seed in (0, 10, 2):
            rows = metrics([0.4, 0.6, 0.8], None if arm == "dense" else 0.25)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / "metrics" / f"{arm}-seed{seed}.jsonl").write_text(text)
    summary.write_summary(tmp_path)
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["arm", "---", *arms[:3]]
    runs = summary.load_runs(tmp_path)
    assert {arm: [*of] for arm, of in runs.items()} == dict.fromkeys(arms[:3], [0, 2, 10])


def test_the_committed_page_says_what_the_committed_runs_show(tmp_path: Path) -> None:
    results = FOLDER / "results"
    shutil.copytree(results / "metrics", tmp_path / "metrics")
    shutil.copy(results / "settings.json", tmp_path)
    summary.write_summary(tmp_path)
    table = (tmp_path / "summary.md").read_text("utf-8")
    assert (results / "summary.md").read_text("utf-8") == table
    page = (results / "README.md").read_text("utf-8")
    assert table in page

    record = json.loads((results / "pretraining.json").read_text("utf-8"))
    arms = summary.load_runs(results)
    rates = {
        arm: [summary.evaluations(rows) for rows in runs.values()] for arm, runs in arms.items()
    }
    steps = {arm: [rows[:-1] for rows in runs.values()] for arm, runs in arms.items()}
    low = {
        arm: summary.lowest(of, f"{summary.TAIL_OF_BIN}0")
        for arm, of in steps.items()
        if arm != "dense"
    }

    def last(arm: str) -> str:
        return f"{fmean(curve[-1].rate for curve in rates[arm]):.3f}"

    def least(arm: str) -> str:
        return f"{min(point.rate for curve in rates[arm] for point in curve):.3f}"

    def compared(arm: str, other: str, index: int = 0) -> str:
        pairs = summary.paired_differences(arms[arm], arms[other])
        return summary.with_interval([pair[index] for pair in pairs.values()])

    def loss(arm: str) -> str:
        """The area below dense rollouts, as a positive number."""
        values = [
            -pair[0] for pair in summary.paired_differences(arms[arm], arms["dense"]).values()
        ]
        return summary.with_interval(values).replace("+", "")

    history = record["history"][-1]
    start = fmean(curve[0].rate for of in rates.values() for curve in of)
    chosen = [row["sparrow/distill_scale"] for rows in steps["distilled-0.80"] for row in rows]
    none, half, whole = (f"{chosen.count(scale) / len(chosen):.0%}" for scale in (0, 0.5, 1))
    gaps = [
        [row["sparrow/distill_p05_scale0"] - row["sparrow/distill_p05_scale1"] for row in rows]
        for rows in steps["distilled-0.80"]
    ]
    fifths = [fmean(gap for of in gaps for gap in of[k : k + 20]) for k in range(0, 100, 20)]
    assert fifths == sorted(fifths)
    [vetoed] = steps["fixed-128-sequence"]
    sentences = [
        f"{record['parameters'] / 1e6:.1f}M parameters, {history['step']} steps",
        f"in {history['seconds']:.0f} s, which ended at a reward of {history['reward']:.3f}",
        f"at the first evaluation of the runs {start:.3f}",
        f"commit `{record['commit']}`",
        f"the {sum(map(len, arms.values()))} that were complete",
        f"for 0.86 (lowest tail {low['calibrated-0.86']:.3f}) and 0.75"
        f" ({low['calibrated-0.75']:.3f}), the schedule for 0.80 with an adapter"
        f" ({low['distilled-0.80']:.3f}), and a fixed 384 tokens ({low['fixed-384']:.3f})",
        f"the pass rates is {compared('calibrated-0.86', 'dense')} for",
        f"{loss('fixed-256')} for a fixed 256 (lowest tail {low['fixed-256']:.3f}; one run",
        f"{loss('fixed-192')} for 192 ({low['fixed-192']:.3f}; one run)",
        f"{loss('fixed-128')} for 128 ({low['fixed-128']:.3f}; six pairs)",
        f"{loss('fixed-64')} for 64 ({low['fixed-64']:.3f}; two pairs)",
        f"between {low['fixed-256']:.3f} and {low['calibrated-0.75']:.3f} there is none",
        f"under 128 to {least('fixed-128')} at the least, in step 15",
        f"it is {last('fixed-128')} under 128 and {last('fixed-64')} under 64, dense"
        f" {last('dense')}",
        f"falls to {least('fixed-128-none')} and recovers to {last('fixed-128-none')} (two runs)",
        f"falls to {last('fixed-128-sequence')} and stays there",
        f"step {vetoed[0]['sparrow/vetoed_fraction']:.0%} of the".replace("%", " %"),
        f"last {vetoed[-1]['sparrow/vetoed_fraction']:.0%}.".replace("%", " %"),
        f"Masks end at {last('fixed-128-mask')},",
        f"seed at {rates['fixed-128'][0][-1].rate:.3f}.",
        f"in area is {compared('distilled-0.80', 'calibrated-0.86')}, after the last step"
        f" {compared('distilled-0.80', 'calibrated-0.86', 1)} (seven pairs)",
        f"none of it in {none} of the steps, half in {half} and all in {whole}.".replace("%", " %"),
        *(
            "from {:.3f} in the first ten steps to {:.3f} in the last ten under the schedule"
            " for 0.86, from {:.3f} to {:.3f} under 256 tokens; under 128 it falls from {:.3f} to"
            " {:.3f}.".format(
                *(
                    end
                    for arm in ("calibrated-0.86", "fixed-256", "fixed-128")
                    for end in summary.ends(steps[arm], curves.TAIL)
                )
            ),
        ),
        "rises, from {:.3f} to {:.3f} (means".format(
            *summary.ends(steps["distilled-0.80"], "sparrow/distill_kl")
        ),
        f"lower than without by {fmean(fifths):.3f} on average",
    ]
    text = " ".join(page.split())
    assert [sentence for sentence in sentences if sentence not in text] == []
    assert sorted(arm for arm, tail in low.items() if tail >= curves.TARGET) == [
        "calibrated-0.75", "calibrated-0.86", "distilled-0.80", "fixed-384",
    ]  # fmt: skip
    falling = {arm for arm, of in rates.items() if any(summary.last_slope(c).falling for c in of)}
    assert falling == set()


def test_curves_are_means_over_the_runs_of_an_arm(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    arms = ("dense", "fixed-64", "fixed-64-mask")
    (tmp_path / "settings.json").write_text(json.dumps({"arms": dict.fromkeys(arms, {})}))
    for arm in arms:
        for seed in (0, 1):
            rows = metrics([0.4, 0.6, 0.8], None if arm == "dense" else 0.25)
            for row in rows[:-1] if arm != "dense" else ():
                row[curves.TAIL] = 0.02 * row["step"]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / "metrics" / f"{arm}-seed{seed}.jsonl").write_text(text)
    runs = summary.load_runs(tmp_path)
    assert curves.pass_rates(runs["dense"]) == [[(0, 0.4), (10, 0.6), (20, 0.8)]] * 2
    found = curves.smoothed_tails(runs["fixed-64"])
    assert found == [[(5, pytest.approx(0.04)), (10, pytest.approx(0.14)),
                      (15, pytest.approx(0.24)), (20, pytest.approx(0.34))]] * 2  # fmt: skip
    curves.draw(tmp_path)
    first = (tmp_path / "curves.svg").read_bytes()
    assert first.startswith(b"<?xml")
    curves.draw(tmp_path)
    assert (tmp_path / "curves.svg").read_bytes() == first


def test_the_committed_page_says_what_distillation_gave() -> None:
    results = FOLDER / "results"
    content = json.loads((results / "distillation.json").read_text("utf-8"))
    page = (results / "README.md").read_text("utf-8")
    (arm,) = content["rows"]
    tails = arm["tails"][-1]
    names = {which: schedule["name"] for which, schedule in content["schedules"].items()}
    by_pair = {pair: gains(content["before"][pair[0]], tails[pair[1]]) for pair in PAIRS}
    for (old, new), bins in by_pair.items():
        for row in bins:
            first, end = row["positions"]
            assert (
                f"| {names[old]} → {names[new]} | {first} to {end - 1} |"
                f" {row['before']:.3f} → {row['after']:.3f} |"
                f" {row['tokens'][0]} and {row['tokens'][1]} |\n"
            ) in page
    same = [row for pair in PAIRS[:2] for row in by_pair[pair]]
    text = " ".join(page.split())
    for sentence in (
        f"for {tails['after']['step']} steps on {tails['after']['responses']} responses",
        f"in {sum(row['raised'] for row in same)} of {len(same)} bins of both schedules, and lower"
        f" in {sum(row['after'] < row['before'] for row in same)} of them",
        f"without the adapter in {sum(row['reached'] for row in by_pair[PAIRS[2]])} of"
        f" {len(by_pair[PAIRS[2]])}.",
        "went from {:.3f} to {:.3f} (means".format(*summary.ends([arm["steps"]], "kl")),
    ):
        assert sentence in text, sentence
    for path in (results / "schedules").glob("*.json"):
        budgets = ", ".join(map(str, BudgetSchedule.from_json(path).budget_tokens))
        assert f"(schedules/{path.name}) | {budgets} |" in page
