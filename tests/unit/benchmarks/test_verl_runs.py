"""The benchmark of verl's trainer: what it asks of verl, and what it makes of verl's log."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from sparrow_sglang.benchmarks import processes
from sparrow_sglang.benchmarks.result_files import Results, whole_rows
from sparrow_sglang.benchmarks.training import verl_runs
from sparrow_sglang.benchmarks.training.verl_runs import (
    ENGINE,
    Trainer,
    VerlRun,
    result_of,
    run_all,
)

FOLDER = Path(__file__).parents[3] / "examples" / "verl"


def log(folder: Path, *steps: dict[str, Any]) -> VerlRun:
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return VerlRun("dense", 0, folder)


def logged(folder: Path) -> int:
    """Steps that a run in this folder has logged."""
    return len(whole_rows(folder / "metrics.jsonl"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for the condition; if it never holds, the test's own time limit ends the wait."""
    while not condition():
        time.sleep(0.01)


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
        # The caller's settings come last, so that they override the benchmark's.
        assert words[-1] == "x=1"

    def test_paths_are_those_of_the_caller(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("mine.json", "model"):
            (tmp_path / name).touch()
        words = VerlRun("mine.json", 0, tmp_path).command(Path("a/words.yaml"), "model", [])
        assert f"{ENGINE}.sparrow_schedule={tmp_path / 'mine.json'}" in words
        assert f"actor_rollout_ref.model.path={tmp_path / 'model'}" in words

    def test_a_missing_recipe_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            verl_runs.main(["nowhere.yaml"])
        assert "recipe nowhere.yaml: no such file" in capsys.readouterr().err


LIMIT_S = 3600
# Stands in for verl: logs the given number of steps, the last once the file `gate` is there; then
# ends if these are 3 and hangs otherwise. With 0 steps it hangs before it opens its log. It ignores
# SIGTERM. Its worker has a process group of its own, as Ray's workers have.
TRAINER = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen(["sleep", "600"], process_group=0)
print(worker.pid, flush=True)
steps, gate = int(sys.argv[1]), sys.argv[2]
while not steps:
    time.sleep(600)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as log:
    for step in range(1, steps + 1):
        while step == steps and not os.path.exists(gate):
            time.sleep(0.01)
        log.write(json.dumps({"step": step, "data": {"timing_s/step": 1.0}}).encode() + b"\\n")
if steps < 3:
    time.sleep(600)
worker.kill()
"""


class Verl:
    """The benchmark with `TRAINER` in place of verl; `steps` are by schedule.

    Its time limit is reached as soon as runs hang and all others have ended.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.work, self.gates = folder / "out.json", folder / "work", folder / "gates"
        self.recipe = folder / "words.yaml"
        self.recipe.write_text("trainer: {}")
        self.gates.mkdir()
        self.steps = {"dense": 3, "fixed-64": 3}
        self.started: list[str] = []
        self.passed_s = 0
        self.running: list[tuple[Path, int, subprocess.Popen[bytes]]] = []
        for schedule in self.steps:
            self.let_go(schedule)
        verl = self

        def command(run: VerlRun, *_: Any) -> list[str]:
            verl.started.append(run.name)
            words = (verl.steps[run.schedule], verl.gates / run.schedule)
            return [sys.executable, "-c", TRAINER, *map(str, words)]

        @contextmanager
        def logged_process(command: list[str], log: Path, *rest: Any, **more: Any) -> Iterator[Any]:
            with processes.logged_process(command, log, *rest, **more) as process:
                verl.running.append((log, int(command[3]), process))
                yield process
                verl.running.pop()

        clock = SimpleNamespace(monotonic=self.now, sleep=time.sleep)
        monkeypatch.setattr(VerlRun, "command", command)
        monkeypatch.setattr(verl_runs, "logged_process", logged_process)
        monkeypatch.setattr(verl_runs, "time", clock)
        monkeypatch.setattr(verl_runs, "_LOOK_S", 0.02)
        monkeypatch.setattr(verl_runs, "version", lambda package: "1")
        monkeypatch.setattr(verl_runs, "model_folder", lambda name: name)
        monkeypatch.setattr(verl_runs, "prepare_out", lambda parser, out: None)

    def hold(self, schedule: str) -> None:
        """Have runs under this schedule wait before their last step."""
        (self.gates / schedule).unlink()

    def let_go(self, schedule: str) -> None:
        (self.gates / schedule).touch()

    def now(self) -> float:
        """What the benchmark's clock shows."""
        hanging = [process for _, steps, process in self.running if steps < 3]
        done = all(
            log.read_text() and logged(log.parent) == steps and (steps < 3 or process.poll() == 0)
            for log, steps, process in self.running
        )
        if hanging and done:
            self.passed_s = LIMIT_S
        return time.monotonic() + self.passed_s

    def run(self, *words: str) -> int:
        """Run the benchmark and return its exit code; `started` has what this call has started."""
        self.started, self.passed_s = [], 0
        usual = [str(self.recipe), "--schedules", "dense", "fixed-64", "--seeds", "0"]
        usual += ["--limit", str(LIMIT_S), "--out", str(self.out), "--work", str(self.work)]
        return verl_runs.main([*usual, *words])

    def rows(self) -> list[tuple[str, int, bool]]:
        rows = json.loads(self.out.read_text())["rows"] if self.out.exists() else []
        return [(row["run"], row["steps"], row["complete"]) for row in rows]

    def wait_for(self, *rows: tuple[str, int, bool]) -> None:
        """Wait until the result has these rows and no others."""
        wait_until(lambda: self.rows() == [*rows])


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verl:
    return Verl(tmp_path, monkeypatch)


def test_runs_that_are_complete_are_not_repeated(
    verl: Verl, capsys: pytest.CaptureFixture[str]
) -> None:
    verl.steps["fixed-64"] = 2
    assert verl.run() == 1
    assert verl.rows() == [("dense-seed0", 3, True), ("fixed-64-seed0", 2, False)]
    # Measured steps stay in the result until the repeated run has got as far again.
    verl.steps["fixed-64"] = 1
    assert verl.run() == 1
    assert verl.rows() == [("dense-seed0", 3, True), ("fixed-64-seed0", 2, False)]
    verl.steps["fixed-64"] = 3
    assert verl.run() == 0
    assert verl.started == ["fixed-64-seed0"]
    assert verl.rows() == [("dense-seed0", 3, True), ("fixed-64-seed0", 3, True)]
    assert verl.run() == 0 and verl.started == []
    verl.recipe.write_text("trainer: {total_epochs: 2}")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        verl.run()
    assert "was measured with other settings" in capsys.readouterr().err


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_only_so_many_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int
) -> None:
    alive: list[int] = []
    seen: list[int] = []

    @contextmanager
    def process(command: Any, file: Path, *_: Any, **__: Any) -> Iterator[Any]:
        log(file.parent, {}, {})
        alive.append(0)
        seen.append(len(alive))
        yield SimpleNamespace(returncode=0, poll=lambda: 0)
        alive.pop()

    monkeypatch.setattr(verl_runs, "logged_process", process)
    monkeypatch.setattr(verl_runs, "_LOOK_S", 0.01)
    runs = [VerlRun("dense", seed, tmp_path / str(seed)) for seed in range(3)]
    results = Results(tmp_path / "out.json")
    assert run_all(runs, Trainer(Path("words.yaml"), "model"), 60, parallel, results) == 0
    assert (len(seen), max(seen)) == (3, parallel)


def test_a_trainer_that_ends_well_without_a_step_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def process(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(returncode=0, poll=lambda: 0)

    monkeypatch.setattr(verl_runs, "logged_process", process)
    monkeypatch.setattr(verl_runs, "_LOOK_S", 0.01)
    run, results = VerlRun("dense", 0, tmp_path / "run"), Results(tmp_path / "out.json")
    run.begin()
    run.log.write_text("nothing to do")
    assert run_all([run], Trainer(Path("words.yaml"), "model"), 60, 1, results) == 1
    assert [row["complete"] for row in results.rows] == [False]


def test_one_run_after_the_other_takes_what_time_is_left(verl: Verl) -> None:
    verl.steps["dense"] = 2
    assert verl.run("--parallel", "1") == 1
    assert (verl.started, verl.rows()) == (["dense-seed0"], [("dense-seed0", 2, False)])
    verl.steps["dense"] = 3
    assert verl.run("--parallel", "1") == 0
    assert verl.rows() == [("dense-seed0", 3, True), ("fixed-64-seed0", 3, True)]


def test_rows_of_another_start_in_the_same_folder_are_not_taken_for_this_ones(verl: Verl) -> None:
    folder = verl.work / "0-0"
    folder.mkdir(parents=True)
    log(folder, {}, {}, {}, {})
    # verl would go on from here, with the steps before it missing.
    (folder / "checkpoints" / "global_step_10").mkdir(parents=True)
    verl.steps["dense"] = 0
    assert verl.run() == 1
    assert not (folder / "checkpoints").exists()
    assert verl.rows()[0] == ("dense-seed0", 0, False)


@pytest.mark.timeout(60)
def test_rows_are_written_while_runs_go_on_and_before_they_are_killed(
    verl: Verl, monkeypatch: pytest.MonkeyPatch
) -> None:
    verl.steps = {"dense": 2, "fixed-64": 3}
    for schedule in verl.steps:
        verl.hold(schedule)
    seen: list[Any] = []
    alive: list[bool] = []
    stop = processes.stop

    def watched(process: Any, wait_s: float) -> None:
        seen.append(verl.rows())
        alive.append(process.poll() is None)
        start = time.monotonic()
        stop(process, wait_s)
        # Neither waits for a process that does not end when it is asked to.
        assert time.monotonic() - start < 5

    monkeypatch.setattr(processes, "stop", watched)
    done = threading.Thread(target=verl.run)
    done.start()
    wait_until(lambda: logged(verl.work / "0-0") == 1)
    verl.let_go("fixed-64")
    # A run has ended, long before the next half minute.
    verl.wait_for(("dense-seed0", 1, False), ("fixed-64-seed0", 3, True))
    verl.let_go("dense")
    done.join()
    assert alive == [False, True]
    assert seen[0] == [("dense-seed0", 2, False), ("fixed-64-seed0", 3, True)]
    for index in range(2):
        worker = int((verl.work / f"{index}-0" / "log.txt").read_text())
        assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie"


@pytest.mark.timeout(60)
def test_rows_are_written_now_and_then(verl: Verl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_runs, "WRITE_S", 0.1)
    verl.steps = {"dense": 2, "fixed-64": 2}
    for schedule in verl.steps:
        verl.hold(schedule)
    done = threading.Thread(target=verl.run)
    done.start()
    # Nothing has ended yet.
    verl.wait_for(("dense-seed0", 1, False), ("fixed-64-seed0", 1, False))
    for schedule in verl.steps:
        verl.let_go(schedule)
    done.join()
    assert verl.rows() == [("dense-seed0", 2, False), ("fixed-64-seed0", 2, False)]


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
