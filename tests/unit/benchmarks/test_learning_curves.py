"""Learning curves side by side: what the runs are told, and what is taken from their metrics."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.result_files import RESULTS
from sparrow_sglang.benchmarks.tables import generate
from sparrow_sglang.benchmarks.training import learning_curves, parallel_runs
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TrainConfig

CONFIG = Path(__file__).parents[3] / "examples" / "story_curves.toml"
SCHEDULES = ["dense", "qwen3-1.7b-0.86"]


@pytest.fixture
def plans(tmp_path: Path) -> list[parallel_runs.RunPlan]:
    return learning_curves.plan_runs(CONFIG, SCHEDULES, [0, 1], tmp_path)


def test_runs_differ_in_schedule_and_seed_only(plans, tmp_path) -> None:
    names = [plan.name for plan in plans]
    assert names == [f"{schedule}-seed{seed}" for schedule in SCHEDULES for seed in (0, 1)]
    assert [plan.beside(".toml").name for plan in plans] == [f"{name}.toml" for name in names]
    told = [plan.config.engine.server_args.get("attention_backend") for plan in plans]
    assert told == ["flashinfer", "flashinfer", None, None]
    for plan in plans:
        rest = plan.config.model_dump(exclude={"run_dir", "seed", "engine"})
        assert rest == plans[0].config.model_dump(exclude={"run_dir", "seed", "engine"})
        file = tmp_path / "again.toml"
        file.write_text("\n".join(parallel_runs.toml_lines(plan.values)))
        assert TrainConfig.load(file) == plan.config


def test_partial_rollouts_are_an_arm_of_their_own(tmp_path) -> None:
    plans = learning_curves.plan_runs(CONFIG, ["fixed-512"], [3], tmp_path, ["fixed-512"])
    assert [plan.arm for plan in plans] == ["fixed-512", "fixed-512, partial"]
    assert [plan.config.rollout.oversubscribe for plan in plans] == [1.0, 1.5]
    whole, partial = (plan.config for plan in plans)
    assert whole.run_dir != partial.run_dir
    rollout = partial.rollout.model_copy(update={"oversubscribe": 1.0})
    same = partial.model_copy(update={"rollout": rollout, "run_dir": whole.run_dir})
    assert same == whole


def test_the_table_shows_the_last_evaluation_that_all_runs_reached(plans, tmp_path) -> None:
    for number, plan in enumerate(plans):
        plan.config.run_dir.mkdir()
        rows = [
            {"step": 0, "eval/pass_rate": 0.2, "timing_s/step": 90.0},
            {"step": 1, "timing_s/step": 4.0, "sparrow/accept_p05": 0.9},
            {"step": 10, "eval/pass_rate": 0.3 + 0.1 * number, "timing_s/step": 6.0},
        ]
        if number:
            rows.append({"step": 20, "eval/pass_rate": 0.9, "timing_s/step": 5.0})
        for row in rows:
            for stage in ("rollout", "logprobs", "mismatch", "update", "sync"):
                row[f"timing_s/{stage}"] = 1.0
        text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "cut'
        (plan.config.run_dir / "metrics.jsonl").write_text(text)
    found = learning_curves.collect(plans)
    assert found[0]["seconds_per_step"]["timing_s/step"] == 5.0  # without the first
    content = {
        "device": "NVIDIA H200",
        "packages": dict.fromkeys(("sglang", "torch", "triton", "flashinfer-python"), "1"),
        "commit": "c",
        "command": "learning_curves.py x.toml",
        "rows": found,
    }
    write_json(tmp_path / RESULTS / "x.json", content)
    lines = [line for line in generate(tmp_path).splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[1:6] for row in cells] == [
        ["dense", "2", "10", "0.200 ± 0.000", "0.350 ± 0.071"],
        ["qwen3-1.7b-0.86", "2", "10", "0.200 ± 0.000", "0.550 ± 0.071"],
    ]


def test_sigterm_writes_what_the_runs_have_measured_so_far(
    tmp_path, monkeypatch, capsys, sigterm_restored
) -> None:
    def stopped(plans: list[parallel_runs.RunPlan], parallel: int) -> None:
        (folder := plans[0].config.run_dir).mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 0, "eval/pass_rate": 0.25}\n')
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(learning_curves, "run_all", stopped)
    out = tmp_path / "o.json"
    words = ["--schedules", "dense", "--seeds", "0", "--work", str(tmp_path), "--out", str(out)]
    assert learning_curves.main([str(CONFIG), *words]) == 1
    assert capsys.readouterr().err == "stopped; repeat the command to go on\n"
    (row,) = json.loads(out.read_text())["rows"]
    assert row["curves"]["eval/pass_rate"] == [[0, 0.25]]


def test_runs_of_other_settings_are_not_taken_for_these(plans, tmp_path, capsys) -> None:
    plan, out = plans[0], tmp_path / "o.json"
    plan.config.run_dir.mkdir()
    (plan.config.run_dir / "metrics.jsonl").write_text('{"step": 40, "eval/pass_rate": 0.25}\n')
    toml = plan.beside(".toml")
    # A complete run may have been in another folder.
    toml.write_text(plan.toml().replace(str(plan.config.run_dir), "elsewhere"))
    parallel_runs.run_all([plan], 1)
    toml.write_text(plan.toml().replace("seed = 0", "seed = 1"))
    with pytest.raises(InputError, match="is complete with other settings"):
        parallel_runs.run_all([plan], 1)
    with pytest.raises(SystemExit):
        learning_curves.main([str(CONFIG), "--work", str(tmp_path), "--out", str(out)])
    assert "run dense-seed0: " in capsys.readouterr().err and not out.exists()


def test_runs_are_spread_over_the_gpus(plans, tmp_path, monkeypatch) -> None:
    """A stand-in for the trainer records its GPU and waits until three runs have done so."""
    package = tmp_path / "modules" / "sparrow_sglang"
    (package / "commands").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "commands" / "__init__.py").touch()
    (package / "commands" / "cli.py").write_text(
        "import os, pathlib, sys, time, tomllib\n"
        "run = pathlib.Path(tomllib.loads(pathlib.Path(sys.argv[2]).read_text())['run_dir'])\n"
        "(run / 'gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "while len(list(run.parent.glob('*/gpu'))) < 3:\n"
        "    time.sleep(0.01)\n"
        "(run / 'metrics.jsonl').write_text('{\"step\": 40}\\n')\n"
    )
    # Python searches the working directory first, so the real package must not lie there.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parallel_runs, "_LOOK_S", 0.01)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-ab,5")
    assert len(plans) == 4
    parallel_runs.run_all(plans, 1, [package.parent])
    found = [(plan.config.run_dir / "gpu").read_text() for plan in plans]
    assert sorted(found[:3]) == ["0", "5", "GPU-ab"]
    assert found[3] in found[:3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parallel_runs.visible_gpus() == [""]


def test_a_wrong_setting_is_one_line(tmp_path, capsys) -> None:
    config = tmp_path / "x.toml"
    config.write_text('steps = 0\n[task]\nname = "story"\n')
    with pytest.raises(SystemExit):
        learning_curves.main([str(config), "--out", str(tmp_path / "o.json")])
    assert "steps=0 is not allowed" in capsys.readouterr().err.splitlines()[-1]
