"""The stability study: its task, how it pretrains, plans its runs, and judges what happened."""

import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import graph_walk
import pretraining
import pytest
import study
import summary
import torch
from graph_walk import WalkOptions
from stability_study import FOLDER, task_of, tiny
from study_settings import StudySettings

from sparrow_sglang.benchmarks.training.distill_result import PAIRS, gains
from sparrow_sglang.benchmarks.training.parallel_runs import run_all, toml_lines
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskConfig, TrainConfig
from sparrow_sglang.rl.tasks import load_task
from sparrow_sglang.schedule import BudgetSchedule

ROOT = FOLDER.parents[1]
OPTIONS = WalkOptions(
    degree=3, least_nodes=5, most_nodes=9, names=12, steps=14, train=20, heldout=10
)


def random_answer(prompt: list[str], draw: random.Random, steps: int) -> list[str]:
    """A walk read off the words of a prompt alone."""
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
            # Another node that an edge leads to is right itself, and the next line starts wrong.
            source = answer[place - 1] if place else prompt.payload["start"]
            lost = ((source, wrong[place]) not in edges) + (place < len(answer) - 2)
        elif place % 3 == 1:
            # Two lines become one, unless there is no other.
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
    # Of one line, of a model less sure of itself: the mass of its two tokens, padded or not.
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
        (arm, seed) for seed in settings.seeds for arm in settings.arms
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
        longest = plan.config.rollout.max_prompt_tokens + plan.config.rollout.max_new_tokens
        assert longest < settings.context_tokens
    starts = {
        plan.config.model_copy(update={"run_dir": Path("x")}).model_dump_json() for plan in plans
    }
    assert len(starts) == len(plans)


def test_a_study_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    file = tmp_path / "results" / "settings.json"
    study._own(file, tiny())
    study._own(file, tiny(parallel=7, seeds=(0, 1)))
    assert json.loads(file.read_text())["seeds"] == [0, 1]
    with pytest.raises(InputError, match=r"walk=.*'steps': 40.* was begun with .*--out"):
        study._own(file, tiny(walk__degree=3))


def test_a_study_that_is_asked_to_end_says_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sigterm_restored: None,
) -> None:
    def terminated(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    # What Ctrl-C is, except in a shell's background jobs, which ignore it.
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
        # Cut by a kill in the middle of the last row.
        ('{"step": 2}\n{"step": 3, "eval', False),
        ('{"step": 2}\n{"step": 3, "eval/pass_rate": 0.1}\n', True),
    ):
        file.write_text(text)
        assert plan.is_complete() == complete
    # Nothing is started then.
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


@pytest.mark.parametrize(
    ("passes", "outcome"),
    [
        ([0.4, 0.6, 0.8], "learnt"),
        ([0.4, 0.45, 0.42], "unchanged"),
        ([0.8, 0.7, 0.6], "lost"),
        ([0.4, 0.8, 0.1], "collapsed"),
        ([0.4, 0.2, 0.0], "collapsed"),
        # Half as good as the best one, but no further from it than chance allows.
        ([0.05, 0.1, 0.04], "unchanged"),
    ],
)
def test_what_became_of_a_run(passes: list[float], outcome: str) -> None:
    rows = metrics(passes, 0.9)
    assert summary.outcome(summary.pass_rates(rows)) == outcome
    assert summary.ends([rows[:-1]], summary.REWARD) == pytest.approx((0.405, 0.585))
    assert summary.ends([rows[:-1]], summary.LENGTH) == pytest.approx((100.5, 118.5))


def test_a_row_of_the_summary_shows_each_run() -> None:
    runs = [metrics([0.4, 0.6, 0.8 - 0.5 * seed], 0.9) for seed in (0, 1)]
    # From 0.49 at step 9 to 0.2 at step 10; then it goes on as if nothing had been.
    runs[1][10][summary.REWARD] = 0.2
    # The lowest tail is that of the worst part of the worst run; a single step is noise.
    for step in (6, 7):
        runs[1][step][f"{summary.TAIL_OF_BIN}0"] = 0.5
    runs[1][12][f"{summary.TAIL_OF_BIN}1"] = 0.2
    cells = summary.arm_cells("x", runs)
    assert list(cells.values()) == [
        "x",
        "0.400",
        "0.800, 0.300",
        "learnt, unchanged",
        "0.405 → 0.585",
        "0%, 59%",
        "100 → 118",
        "0.500, 0.545",
        "0.900, 0.890",
        "0.001",
    ]
    dense = summary.arm_cells("dense", [metrics([0.4, 0.6, 0.8], None)])
    assert dense["lowest tail by bin"] == dense["median"] == "–"


def test_the_summary_is_made_from_the_metrics_alone(tmp_path: Path) -> None:
    arms = {}
    for arm, tail in (("dense", None), ("small", 0.25)):
        arms[arm] = [tmp_path / f"{arm}-seed{seed}.jsonl" for seed in (0, 1)]
        for seed, file in enumerate(arms[arm]):
            rows = metrics([0.4, 0.6, 0.8 - 0.5 * seed], tail)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary.write_summary(tmp_path, arms)
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["arm", "---", "dense", "small"]


def test_the_committed_page_says_what_the_committed_runs_show(tmp_path: Path) -> None:
    results = FOLDER / "results"

    def load(name: str) -> Any:
        return json.loads((results / name).read_text("utf-8"))

    settings, record = load("settings.json"), load("pretraining.json")
    arms_of = {
        arm: [results / "metrics" / f"{arm}-seed{seed}.jsonl" for seed in settings["seeds"]]
        for arm in settings["arms"]
    }
    summary.write_summary(tmp_path, arms_of)
    table = (tmp_path / "summary.md").read_text("utf-8")
    assert (results / "summary.md").read_text("utf-8") == table
    page = (results / "README.md").read_text("utf-8")
    assert table in page
    runs = {
        arm: [[json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files]
        for arm, files in arms_of.items()
    }
    rates = {arm: [summary.pass_rates(rows) for rows in of] for arm, of in runs.items()}
    first, last = (
        {arm: sum(rate[end][0] for rate in of) / len(of) for arm, of in rates.items()}
        for end in (0, -1)
    )
    rewards = {
        arm: [[row[summary.REWARD] for row in rows if summary.REWARD in row] for rows in of]
        for arm, of in runs.items()
    }
    falls = {arm: [summary.largest_fall(values) for values in of] for arm, of in rewards.items()}
    mean_fall = {arm: f"{sum(of) / len(of):.0%}".replace("%", " %") for arm, of in falls.items()}
    steps = {arm: [rows[:-1] for rows in of] for arm, of in runs.items()}
    bins = [f"{summary.TAIL_OF_BIN}{index}" for index in (0, 1)]
    low = {
        arm: min(summary.lowest(of, key) for key in bins)
        for arm, of in steps.items()
        if arm != "dense"
    }
    kl = summary.ends(steps["distilled-0.80"], "sparrow/distill_kl")
    start = sum(rate[0][0] for of in rates.values() for rate in of) / 15
    history = record["history"][-1]
    sentences = [
        f"{record['parameters'] / 1e6:.1f}M parameters, {history['step']} steps",
        f"in {history['seconds']:.0f} s, which ended at a reward of {history['reward']:.3f}",
        f"at the first evaluation of the runs {start:.3f}",
        f"commit `{record['commit']}`: `{record['command']}`",
        f"from {first['dense']:.3f} to {last['dense']:.3f}.",
        f"from {first['calibrated-0.86']:.3f} to {last['calibrated-0.86']:.3f} (`0.86`",
        f"and to {last['calibrated-0.75']:.3f} (`0.75`)",
        f"adapter: from {first['distilled-0.80']:.3f} to {last['distilled-0.80']:.3f}",
        f"all three runs: from {first['fixed-64']:.3f} to {last['fixed-64']:.3f}",
        f"tails of {low['calibrated-0.86']:.3f} (`0.86`), {low['calibrated-0.75']:.3f} (`0.75`) and"
        f" {low['distilled-0.80']:.3f} (with the adapter)",
        f"sparse one ({mean_fall['distilled-0.80']}), before `0.75`"
        f" ({mean_fall['calibrated-0.75']}), `0.86` ({mean_fall['calibrated-0.86']})"
        f" and 64 tokens ({mean_fall['fixed-64']})",
        "from {:.3f} to {:.3f}.".format(*kl),
        "under `0.86` fell from 0.674 to 0.480",
    ]
    text = " ".join(page.split())
    assert [sentence for sentence in sentences if sentence not in text] == []
    assert max(low.values()) < 0.86
    assert {arm: sum(fall > 1 / 3 for fall in of) for arm, of in falls.items()} == {
        "dense": 0, "calibrated-0.86": 3, "calibrated-0.75": 1, "fixed-64": 3, "distilled-0.80": 1,
    }  # fmt: skip
    assert (0.674, 0.480) in [
        (round(max(rate)[0], 3), round(rate[-1][0], 3)) for rate in rates["calibrated-0.86"]
    ]
    ends = {
        arm: (last[arm], math.hypot(*(rate[-1][1] for rate in of)) / len(of))
        for arm, of in rates.items()
    }
    for arm in low:
        assert last[arm] < last["dense"] and summary.differ(ends[arm], ends["dense"]), arm
    [limits] = (ROOT / "docs" / "limits.md").read_text("utf-8").split("\n## What is not known")[1:]
    assert "Four of its six calibrated runs" in " ".join(limits.split())


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
