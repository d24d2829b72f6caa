"""The stability study: its task, how it pretrains, plans its runs, and judges what happened."""

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import arms
import findings
import graph_walk
import page
import pretraining
import pytest
import study
import torch
from graph_walk import WalkOptions
from stability_study import FOLDER, task_of, tiny
from study_settings import StudySettings

from sparrow_sglang.benchmarks.training.parallel_runs import run_all, toml_lines
from sparrow_sglang.config import ConfigError
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
    with pytest.raises(ConfigError, match=match):
        load_task(TaskConfig(name=name), lambda messages: (1,))


def test_options_that_no_graph_fits_are_refused() -> None:
    config = TaskConfig(name="graph_walk:load", options=OPTIONS.model_dump() | {"names": 8})
    with pytest.raises(ConfigError, match=r"task\.options\.names=8: .*most_nodes"):
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
    with pytest.raises(ConfigError, match=r"pretrain\.steps=3: the reward is 0\.0\d+ after"):
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
    plans = arms.plan_runs(settings, tmp_path / "model", files, tmp_path / "runs")
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
    with pytest.raises(ConfigError, match=r"walk=.*'steps': 40.* was begun with .*--out"):
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
    plan = arms.plan_runs(tiny(arms={"dense": {"schedule": "dense"}}), tmp_path, {}, tmp_path)[0]
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
        ("max_total_tokens", "max_tokens", r"tiny\.server_args: max_tokens .*'max_total_tokens'"),
        ("names = 32", "names = 8", r"tiny\.walk\.names=8: .*most_nodes"),
        ("evaluate_lines = 40", "evaluate_lines = 41", r"evaluate_lines=41: .*walk\.steps=40"),
        ("lr = 4e-3", "rate = 4e-3", r"tiny\.pretrain\.lr: Field required"),
    ):
        assert old in text
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=match):
            StudySettings.load(file, "tiny")
    with pytest.raises(ConfigError, match=r"--scale huge: .* it has tiny, full"):
        StudySettings.load(FOLDER / "study.toml", "huge")


def metrics(
    passes: list[float], tail: float | None, steps: int = 20, reward: float = 0.4
) -> list[dict[str, float]]:
    """Rows of a run that is evaluated at even distances, the last time after its last step."""
    rows: list[dict[str, float]] = []
    for step in range(steps + 1):
        row: dict[str, float] = {"step": step}
        if step < steps:
            row |= {findings.REWARD: reward + 0.01 * step, findings.LENGTH: 100.0 + step}
            row |= {findings.KL: 0.001}
            if tail is not None:
                row |= {f"{findings.TAIL_OF_BIN}0": tail, f"{findings.TAIL_OF_BIN}1": tail - 0.01}
        every = steps // (len(passes) - 1)
        if step % every == 0:
            row |= {findings.PASS_RATE: passes[step // every], f"{findings.PASS_RATE}_stderr": 0.04}
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
    summary = findings.summarise("x", [metrics(passes, 0.9)])
    assert summary.runs[0].outcome == outcome
    assert summary.keeps_up([]) == (outcome in ("learnt", "unchanged"))
    assert summary.rewards == pytest.approx((0.405, 0.585))
    assert summary.lengths == pytest.approx((100.5, 118.5))
    assert summary.tails == {0: 0.9, 1: 0.89}


def test_the_lowest_tail_is_that_of_the_worst_part_of_the_worst_run() -> None:
    runs = [metrics([0.4, 0.6, 0.8], 0.9) for _ in range(2)]
    for step in (6, 7):
        runs[1][step][f"{findings.TAIL_OF_BIN}0"] = 0.5
    # A single step is noise.
    runs[1][12][f"{findings.TAIL_OF_BIN}1"] = 0.2
    summary = findings.summarise("x", runs)
    assert summary.tails == {0: 0.9, 1: 0.89}
    assert summary.lowest_tails == {0: pytest.approx(0.5), 1: pytest.approx((0.2 + 0.89) / 2)}


def test_a_fall_on_the_way_is_seen_whatever_the_ends_say() -> None:
    steady, fallen = (metrics([0.4, 0.8, 0.7], 0.9) for _ in range(2))
    # From 0.49 at step 9 to 0.2 at step 10; then it goes on as if nothing had been.
    fallen[10][findings.REWARD] = 0.2
    summary = findings.summarise("x", [steady, fallen])
    assert [run.outcome for run in summary.runs] == ["learnt", "learnt"]
    assert [run.reward_fall for run in summary.runs] == pytest.approx([0, 1 - 0.2 / 0.49])
    assert [run.steady for run in summary.runs] == [True, False]
    # 0.1 is less than two standard errors of a difference, 0.3 is more, from whichever best.
    for passes, fall in (
        ([0.4, 0.8, 0.7], None),
        ([0.4, 0.7, 0.4], (0.7, 0.4)),
        ([0.6, 0.3, 0.8], (0.6, 0.3)),
        ([0.4, 0.9, 0.5, 0.7, 0.4, 0.6], (0.9, 0.4)),
    ):
        [run] = findings.summarise("x", [metrics(passes, 0.9)]).runs
        assert run.pass_fall == fall


def test_the_arm_that_falls_least_is_called_the_steadiest() -> None:
    def arm(name: str, drop: float, tail: float | None = 0.9) -> findings.ArmSummary:
        rows = metrics([0.4, 0.6, 0.8], tail)
        rows[10][findings.REWARD] *= drop
        return findings.summarise(name, [rows])

    text = "\n".join(
        findings.steadiness([arm("dense", 0.5, None), arm("a", 0.4), arm("b", 0.9), arm("c", 0.7)])
    )
    assert "running best: dense 0 of 1, a 0 of 1, b 1 of 1, c 1 of 1." in text
    assert re.search(r"steadiest first, .*: b \(8%\), c \(29%\), a \(59%\)\.", text)


def test_the_committed_page_says_what_the_committed_runs_show() -> None:
    results = FOLDER / "results"
    settings = page._json(results / "settings.json")
    arms_of = {
        arm: [
            page._rows(results / "metrics" / f"{arm}-seed{seed}.jsonl")
            for seed in settings["seeds"]
        ]
        for arm in settings["arms"]
    }
    summaries = [findings.summarise(arm, runs) for arm, runs in arms_of.items()]
    lines = "\n".join(page._lines(results, settings, summaries))
    assert f"{lines}\n" == (results / page.PAGE).read_text(encoding="utf-8")
    # The figures that the other pages quote, from the rows alone.
    falls = {}
    for arm, runs in arms_of.items():
        key = "critic/score/mean"
        rewards = [[row[key] for row in run if key in row] for run in runs]
        falls[arm] = [
            max(
                1 - values[j] / values[i] for i in range(len(values)) for j in range(i, len(values))
            )
            for values in rewards
        ]
    calibrated = [fall for arm, each in falls.items() if "calibrated" in arm for fall in each]
    assert sum(fall > 1 / 3 for fall in calibrated) == 4 and len(calibrated) == 6
    means = {arm: sum(each) / len(each) for arm, each in falls.items() if arm != "dense"}
    assert min(means, key=means.__getitem__) == "distilled-0.80"
    [text] = (ROOT / "docs" / "limits.md").read_text("utf-8").split("\n## What is not known")[1:]
    assert "Four of its six calibrated runs" in " ".join(text.split())


def test_words_follow_from_the_numbers_also_against_the_paper() -> None:
    good, bad = [0.4, 0.6, 0.8], [0.4, 0.2, 0.0]
    cases = {"dense": (good, None), "safe": (good, 0.9), "small": (bad, 0.3)}
    text = list(
        findings.sentences([findings.summarise(a, [metrics(*c)]) for a, c in cases.items()])
    )
    assert "0.400 to 0.800 (1 learnt)" in text[0] and "no tail" in text[0]
    assert "lowest and median, 0.900 and 0.900 in bin 0, 0.890 and 0.890 in bin 1" in text[1]
    assert "1 collapsed" in text[2]
    assert text[3].endswith("in 2 of 2 sparse arms.") and len(text) == 4
    cases = {"bold": (good, 0.5), "safe": (bad, 0.9), "edge": (good, 0.86)}
    text = list(
        findings.sentences([findings.summarise(a, [metrics(*c)]) for a, c in cases.items()])
    )
    assert text[3].endswith("in 0 of 3 sparse arms.")
    assert "bold has its lowest tail, 0.490, below 0.86, and kept up" in text[4]
    assert "safe has its lowest tail, 0.890, at or above 0.86, and did not keep up" in text[5]
    # Neither worse nor better than before, which is not what dense rollouts made of it.
    cases = {"dense": (good, None), "stuck": ([0.4, 0.4, 0.4], 0.9)}
    stuck = list(
        findings.sentences([findings.summarise(a, [metrics(*c)]) for a, c in cases.items()])
    )
    assert "1 unchanged" in stuck[1] and stuck[2].endswith("in 0 of 1 sparse arms.")
    assert stuck[3].endswith("collapsed or lost, at lowest tails of: stuck (0.890).")
    # The lower bin counts.
    assert "edge has its lowest tail, 0.850, below 0.86, and kept up" in text[6]


def tail(value: float) -> dict[str, Any]:
    """Of one bin, its interval 0.02 to both sides."""
    where = {"bin": 0, "first_position": 0, "end_position": 400, "tokens": 1000}
    return where | {"tail": value, "tail_low": value - 0.02, "tail_high": value + 0.02}


DISTILLATION = {
    "schedules": {"given": {"name": "walk-0.86"}, "bolder": {"name": "walk-0.75"}},
    "before": {"given": [tail(0.86)], "bolder": [tail(0.75)]},
    "rows": [
        {
            "steps": [{"kl": 0.05}, {"kl": 0.06}],
            "tails": [
                {
                    "after": {"step": 24, "responses": 768},
                    "given": [tail(0.89)],
                    "bolder": [tail(0.88)],
                }
            ],
        }
    ],
    "cost": {"adapter_step_s": 1.5, "share_of_dense_update": 0.25},
}


def test_the_page_is_made_from_the_results_alone(tmp_path: Path) -> None:
    settings = tiny(
        seeds=(0, 1), arms={"dense": {"schedule": "dense"}, "small": {"schedule": "fixed-64"}}
    )
    study._own(tmp_path / "settings.json", settings)
    record = {
        "parameters": 1_500_000,
        "device": "a device",
        "packages": {"sglang": "0.5.17", "torch": "2.11.0"},
        "commit": "abc",
        "command": "study.py",
        "history": [{"step": 7, "nodes": 16, "loss": 0.1, "reward": 0.333, "seconds": 12.0}],
    }
    (tmp_path / "pretraining.json").write_text(json.dumps(record))
    for folder in ("metrics", "schedules"):
        (tmp_path / folder).mkdir()
    BudgetSchedule(
        name="x", page_size=16, bin_tokens=128, budget_tokens=(64, 96), tail_target=0.86
    ).save(tmp_path / "schedules" / "walk-0.86.json")
    for arm, tail in (("dense", None), ("small", 0.25)):
        for seed in (0, 1):
            rows = metrics([0.4, 0.6, 0.8 - 0.5 * seed], tail)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / "metrics" / f"{arm}-seed{seed}.jsonl").write_text(text)
    (tmp_path / "distillation.json").write_text(json.dumps(DISTILLATION | {"cost": None}))
    assert "of a dense update" not in page.write_page(tmp_path).read_text()
    (tmp_path / "distillation.json").write_text(json.dumps(DISTILLATION))
    text = page.write_page(tmp_path).read_text()
    assert "1.5M parameters, 7 steps" in text and "reward of 0.333" in text
    assert "| small | 0.400 | 0.800, 0.300 |" in text
    assert "| 0.250, 0.240 | 0.250, 0.240 | 0.001 | learnt, unchanged |" in text
    assert "0.250 and 0.250 in bin 0" in text
    assert "| 64, 96 | 128 |" in text
    assert "after 24 steps, on 768 responses" in text
    assert "outside both 95 % intervals, in 1 of 2 bins" in text
    assert "had without the adapter in 1 of 1" in text and "25% of a dense update" in text
    assert "| walk-0.86 → walk-0.75 | 0 to 399 | 0.860 → 0.880 | 1000 and 1000 |" in text
    import matplotlib.image

    for picture in ("curves.png", "tails.png"):
        assert f"({picture})" in text
        pixels = matplotlib.image.imread(tmp_path / picture)
        assert pixels[..., :3].std() > 0.01
