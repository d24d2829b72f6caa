"""The benchmark of verl's trainer: what it asks of verl, and what it makes of verl's log."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sparrow_sglang.benchmarks.training import verl_runs
from sparrow_sglang.benchmarks.training.verl_runs import ENGINE, VerlRun, result_of, run_all

FOLDER = Path(__file__).parents[3] / "examples" / "verl"


def log(folder: Path, *steps: dict[str, Any]) -> VerlRun:
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return VerlRun("dense", 0, folder)


class TestResult:
    def test_curves_and_means_without_the_first_step(self, tmp_path: Path) -> None:
        steps = [
            {"val-core/words/reward/mean@1": 0.25},
            {"timing_s/gen": 9.0, "perf/throughput": 1.0, "critic/score/mean": 0.5},
            {"timing_s/gen": 2.0, "perf/throughput": 3.0, "critic/score/mean": 0.6},
            {"timing_s/gen": 4.0, "perf/throughput": 5.0, "actor/lr": 1.0},
        ]
        result = result_of(log(tmp_path, *steps))
        assert (result["run"], result["steps"]) == ("dense-seed0", 3)
        assert result["curves"]["critic/score/mean"] == [[1, 0.5], [2, 0.6]]
        assert result["curves"]["val-core/words/reward/mean@1"] == [[0, 0.25]]
        assert "actor/lr" not in result["curves"]
        assert result["seconds_per_step"] == {"timing_s/gen": 3.0}
        assert result["tokens_per_s"] == 4.0

    def test_a_line_that_is_not_whole_is_left_out(self, tmp_path: Path) -> None:
        run = log(tmp_path, {}, {"timing_s/gen": 1.0})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "da')
        assert result_of(run)["steps"] == 1

    def test_a_run_that_never_began(self, tmp_path: Path) -> None:
        result = result_of(VerlRun("dense", 1, tmp_path))
        assert (result["steps"], result["curves"], result["tokens_per_s"]) == (0, {}, None)


class TestCommand:
    @pytest.mark.parametrize(("schedule", "backend"), [("dense", "flashinfer"), ("fixed-64", None)])
    def test_only_sparse_runs_have_a_schedule(
        self, tmp_path: Path, schedule: str, backend: str | None
    ) -> None:
        words = VerlRun(schedule, 3, tmp_path).command(Path("a/words.yaml"), "model", ["x=1"])
        chosen = [word for word in words if word.startswith(f"{ENGINE}.attention_backend")]
        assert chosen == ([f"{ENGINE}.attention_backend={backend}"] if backend else [])
        assert (f"{ENGINE}.sparrow_schedule={schedule}" in words) == (schedule != "dense")
        assert (f"~{ENGINE}.sparrow_schedule" in words) == (schedule == "dense")
        assert words[words.index("--config-name") + 1] == "words"
        # What the caller asks for goes before what the benchmark asks for.
        assert words[-1] == "x=1"

    @pytest.mark.parametrize(("parallel", "most"), [(1, 1), (2, 2), (3, 3)])
    def test_only_so_many_run_at_a_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int, most: int
    ) -> None:
        alive: list[int] = []
        seen: list[int] = []

        @contextmanager
        def process(*_: Any) -> Iterator[Any]:
            alive.append(0)
            seen.append(len(alive))
            yield SimpleNamespace(returncode=0, poll=lambda: 0)
            alive.pop()

        monkeypatch.setattr(verl_runs, "logged_process", process)
        runs = [VerlRun("dense", seed, tmp_path / str(seed)) for seed in range(3)]
        assert run_all(runs, Path("words.yaml"), "model", [], [], 60, parallel) == 0
        assert (len(seen), max(seen)) == (3, most)

    def test_runs_that_the_limit_leaves_out_have_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @contextmanager
        def process(*_: Any) -> Iterator[Any]:
            yield SimpleNamespace(returncode=0, poll=lambda: 0)

        monkeypatch.setattr(verl_runs, "logged_process", process)
        runs = [VerlRun("dense", seed, tmp_path / str(seed)) for seed in range(3)]
        assert run_all(runs, Path("words.yaml"), "model", [], [], 0, 1) == 2

    def test_a_missing_recipe_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            verl_runs.main(["nowhere.yaml"])
        assert "recipe nowhere.yaml: no such file" in capsys.readouterr().err


def test_slots_of_the_recipe_fit() -> None:
    """A slot beyond those that the servers have would write into another one's states."""
    recipe = yaml.safe_load((FOLDER / "words_grpo.yaml").read_text())
    loops = yaml.safe_load((FOLDER / "agent_loops.yaml").read_text())
    agent = recipe["actor_rollout_ref"]["rollout"]["agent"]
    [loop] = [loop for loop in loops if loop["name"] == agent["default_agent_loop"]]
    variables = recipe["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    slots, steps = map(int, variables["SPARROW_RECORD"].split("x"))
    assert slots >= agent["num_workers"] * loop["slots_per_worker"]
    assert steps >= recipe["data"]["max_response_length"]


def test_reward_is_the_share_of_words() -> None:
    spec = importlib.util.spec_from_file_location("verl_task", FOLDER / "task.py")
    assert spec is not None and spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    text = "The RIVER ran. Stones, not one stone!"
    assert task.compute_score("words", text, ["river", "stone", "rive", "cloud"]) == 0.5
    prompt, words = next(task.prompts(1, seed=0))
    assert len(set(words)) == task.WORDS_OF_PROMPT
    assert all(word in prompt for word in words)
