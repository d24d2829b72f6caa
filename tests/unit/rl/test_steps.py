"""Training steps with a stand-in for the engine that samples by transformers."""

import math
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ascii_task
import numpy as np
import pytest
import torch
from ascii_task import rows, untimed
from reward_groups import AtOnce, scores_of
from sampler import TOKENS, Sampler
from training import optimizer_steps, settings
from transformers import AutoModelForCausalLM

from sparrow_sglang.commands.cli import main
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl import evaluation, learner, loss, trainer
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.rollout import Sampling, sample_request
from sparrow_sglang.rl.runs import run as run_module
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, owned
from sparrow_sglang.rl.runs.run import newest_checkpoint
from sparrow_sglang.rl.tasks import TASKS
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Prompt, Rollout
from sparrow_sglang.run_folder import read_rows

SMALL = {
    "steps": 3,
    "rollout": {"prompts_per_step": 2, "max_new_tokens": TOKENS},
    "optimizer": {"lr": 1e-3},
    "evaluation": {"every_steps": 0},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ascii_task.save_model_of_bytes(tmp_path_factory.mktemp("bytes"), num_hidden_layers=2)


@dataclass
class Run:
    """A run in `folder`, and the stand-ins for engines that it has started."""

    model: str
    folder: Path
    engines: list[Sampler]

    def config(self, **sections: Any) -> TrainConfig:
        return settings(self.model, self.folder, "dense", SMALL, **sections)

    def train(self, resume: bool = False, **sections: Any) -> list[dict[str, Any]]:
        """Rows of the metrics that are in the folder afterwards."""
        trainer.train(self.config(**sections), resume=resume)
        return rows(self.folder)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@pytest.fixture
def run_with_workers(model: str, tmp_path: Path) -> Iterator[Run]:
    run = Run(model, tmp_path / "run", [])

    def start_engine(*args: Any, **server_args: Any) -> Sampler:
        run.engines.append(Sampler(*args, **server_args))
        return run.engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "LocalEngine", start_engine)
        patch.setitem(TASKS, ascii_task.NAME, ascii_task.load)
        yield run


@pytest.fixture
def run(run_with_workers: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Its rewards are computed without reward workers."""
    monkeypatch.setattr(RewardPool, "score", lambda pool, groups: scores_of(groups, pool.reward))
    monkeypatch.setattr(RewardPool, "scoring", lambda pool: AtOnce(pool.reward))
    return run_with_workers


def spoil(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[int], bool]) -> None:
    """Make the losses of these optimizer steps, counted from 0, not a number."""
    taken = iter(range(1000))

    def spoilt(*args: Any) -> tuple[torch.Tensor, dict[str, float]]:
        value, metrics = policy_loss(*args)
        return value * (math.nan if chosen(next(taken)) else 1.0), metrics

    policy_loss = loss.policy_loss
    monkeypatch.setattr(loss, "policy_loss", spoilt)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_run_is_of_one_distribution(run: Run, mini_batches: int) -> None:
    algorithm = {"mini_batches": mini_batches}
    written = run.train(algorithm=algorithm, rollout={"temperature": 1.7})
    for row in written:
        # The policy scores the tokens at the temperature that they were sampled at, ...
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["sparrow/ess_token"] == pytest.approx(1, abs=1e-6)
        # ... and is trained at it: its log-probs are those that it was scored with.
        if mini_batches == 1:
            assert row["actor/ppo_kl"] == pytest.approx(0, abs=1e-5)
    (engine,) = run.engines
    expected = float(np.mean(engine.entropies))
    assert written[-1]["actor/entropy"] == pytest.approx(expected, rel=1e-4)
    assert engine.arguments["dtype"] == "float32"


def test_gradients_that_are_not_finite_cost_their_steps_and_end_the_run_with_a_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A step has two mini-batches; skipped optimizer steps in a row are counted across steps.
    spoil(monkeypatch, lambda step: step >= 2)
    config = run.config(steps=9, algorithm={"mini_batches": 2})
    monkeypatch.setattr(TrainConfig, "load", lambda *_: config)
    assert main(["train", "run.toml"]) == 1
    said = capsys.readouterr().err
    assert said.count("sparrow train: error: the gradients of 6 optimizer steps in a row were") == 1
    assert "step-000004; go on with --resume" in said
    written = rows(run.folder)
    assert [row["actor/skipped_steps"] for row in written] == [0, 2, 2, 2]
    assert ["actor/grad_norm" in row for row in written] == [True, False, False, False]
    assert all(math.isfinite(value) for row in written for value in row.values())
    folder = run.checkpoints / "step-000004"
    assert optimizer_steps(folder) == {2}
    trained = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert all(weight.isfinite().all() for weight in trained.parameters())
    # The run goes on from that checkpoint once the cause is gone.
    monkeypatch.undo()
    written = run.train(resume=True, steps=5, algorithm={"mini_batches": 2})
    assert written[-1]["actor/skipped_steps"] == 0


def test_a_resumed_run_equals_one_that_was_never_stopped(run: Run, tmp_path: Path) -> None:
    """To the bit: prompts, samples, learning rates, weights."""
    sections = {"checkpoint": {"every_steps": 1}, "optimizer": {"lr": 1e-2, "warmup_steps": 2}}
    parts = replace(run, folder=tmp_path / "parts")
    torch.manual_seed(0)
    run.train(**sections)
    torch.manual_seed(0)
    parts.train(**sections, steps=1)
    written = parts.train(resume=True, **sections)
    assert untimed(run.folder) == untimed(parts.folder)
    assert [row["actor/lr"] for row in written] == [5e-3, 1e-2, 1e-2]
    assert written[-1]["sparrow/epochs"] == 3 * 2 / 20
    answers = read_rows(parts.folder / "responses.jsonl")
    prompts = [row["prompt_id"] for row in answers if row["sample"] == 0]
    assert len(prompts) == len(set(prompts)) == 3 * 2
    # Its engine draws other numbers than the steps before it.
    assert [engine.arguments["random_seed"] for engine in run.engines] == [0, 0, 1]


def test_evaluation_samples_as_it_is_told_and_reports_pass_at_k(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def sample(self: Sampler, prompt: Prompt, number: int, sampling: Sampling) -> Rollout:
        asked.append(sample_request(prompt.input_ids, sampling)["sampling_params"])
        return drawn(self, prompt, number, sampling)

    drawn = Sampler._sample
    monkeypatch.setattr(Sampler, "_sample", sample)
    evaluation = {
        "every_steps": 1,
        "prompts": 2,
        "samples_per_prompt": 3,
        "pass_at": [1, 3],
        "pass_reward": 0.4,
        "max_new_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
    }
    *_, last = run.train(steps=1, evaluation=evaluation)
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    dense = {"sparrow": {"dense": True}}
    drawn_from = {
        (*(parameters[name] for name in names), parameters.get("custom_params") == dense)
        for parameters in asked
    }
    assert drawn_from == {(20, 0.5, 0.9, 40, True), (TOKENS, 1.0, 1.0, -1, False)}
    assert 0 < last["eval/pass@1"] <= last["eval/pass@3"] <= 1
    assert last["eval/reward_errors"] == 0
    answers = read_rows(run.folder / "evaluations.jsonl")
    assert [row["step"] for row in answers] == [0] * 6 + [1] * 6
    assert {row["set"] for row in answers} == {""} and all(row["prompt"] for row in answers)


def test_the_checkpoint_of_the_best_evaluation_is_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([0.1, 0.2, 0.7, 0.7, 0.4])

    def rated(of: Any) -> evaluation.Evaluation:
        found = evaluation.evaluate(of)
        return replace(found, metrics=found.metrics | {"eval/pass_rate": next(rates)})

    monkeypatch.setattr(trainer, "evaluate", rated)
    checkpoint = {"every_steps": 0, "keep": 1}
    run.train(steps=4, evaluation={"every_steps": 1, "prompts": 2}, checkpoint=checkpoint)
    kept = {path.name for path in run.checkpoints.glob("step-*")}
    assert kept == {"step-000002", "step-000004"}


def test_a_run_that_is_killed_in_its_last_checkpoint_has_its_last_evaluation(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As by SIGKILL: the rows that are written until then are all there is."""

    def killed(*args: Any) -> None:
        written.append(rows(run.folder))
        raise Killed

    written: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(Checkpoints, "best", lambda self: {})
    monkeypatch.setattr(Checkpoints, "save", killed)
    with pytest.raises(Killed):
        run.train(evaluation={"every_steps": 3, "prompts": 2}, checkpoint={"every_steps": 0})
    assert [row["step"] for row in written[0] if "eval/pass_rate" in row] == [0, 3]


def test_a_policy_that_may_have_been_updated_in_part_is_not_saved(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        if steps.pop():
            raise MemoryError
        return update(*args)

    steps, update = [True, False], LocalLearner.update
    monkeypatch.setattr(LocalLearner, "update", broken)
    with pytest.raises(MemoryError):
        run.train(checkpoint={"every_steps": 0})
    assert len(rows(run.folder)) == 1 and newest_checkpoint(run.folder) is None


def poison(policy: DensePolicy) -> None:
    with torch.no_grad():
        next(policy.named_parameters())[2].view(-1)[0] = torch.nan


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("by", ["the optimizer", "a later hand"])
def test_the_last_finite_state_outlives_weights_that_are_not(
    run: Run, monkeypatch: pytest.MonkeyPatch, mini_batches: int, by: str
) -> None:
    updates: list[int] = []

    def poisoned(self: LocalLearner, *args: Any) -> Any:
        updates.append(0)
        if by == "the optimizer" and len(updates) == 4:
            step = self.policy.loss_step
            self.policy.loss_step = lambda *args: [step(*args), poison(self.policy)][0]  # type: ignore
        updated = update(self, *args)
        if len(updates) == 4:
            poison(self.policy)
        return updated

    update = LocalLearner.update
    sections: dict[str, Any] = {"algorithm": {"mini_batches": mini_batches}}
    sections["checkpoint"] = {"every_steps": 1, "keep": 1}
    with monkeypatch.context() as patch:
        patch.setattr(LocalLearner, "update", poisoned)
        last = run.checkpoints / "step-000003"
        with pytest.raises(FloatingPointError, match=f"not finite.*the last checkpoint: {last}"):
            run.train(steps=6, **sections)
    assert list(last.parent.glob("step-*")) == [last]
    written = run.train(resume=True, steps=5, **sections)
    assert [row["step"] for row in written] == [0, 1, 2, 3, 4]


def test_an_intact_state_is_saved_when_its_log_probs_are_not_finite(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(self: DensePolicy, *args: Any) -> Any:
        values, entropies = logprobs(self, *args)
        passes.append(self.model.training)
        return values * (torch.nan if sum(passes) == 3 else 1.0), entropies

    passes: list[bool] = []
    logprobs = DensePolicy._logprobs
    monkeypatch.setattr(DensePolicy, "_logprobs", overflowing)
    last = run.checkpoints / "step-000002"
    with pytest.raises(FloatingPointError, match=f"step 2, prompt .*the last checkpoint: {last}"):
        run.train(checkpoint={"every_steps": 0})
    assert optimizer_steps(last) == {2} and len(rows(run.folder)) == 2


@pytest.mark.parametrize(("after_s", "saved"), [(600.0, [1, 4, 5]), (0.0, [1, 2, 3, 4, 5])])
def test_early_checkpoints_follow_the_first_step_and_then_the_clock(
    run: Run, monkeypatch: pytest.MonkeyPatch, after_s: float, saved: list[int]
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda *args: steps.append(args[-1].step))
    monkeypatch.setattr(run_module, "EARLY_S", after_s)
    run.train(steps=5, checkpoint={"every_steps": 4})
    assert steps == saved


def test_a_resumed_run_first_prints_where_it_starts_and_what_it_drops(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, checkpoints = run.folder, run.checkpoints

    def first_line() -> str:
        written = run.train(resume=True, checkpoint={"every_steps": 1, "keep": 9})
        assert [row["step"] for row in written] == [0, 1, 2]
        return capsys.readouterr().out.splitlines()[0]

    assert first_line() == f"resuming: {folder} is new, so the run begins at step 0"
    with owned(folder), pytest.raises(InputError, match="another process"):
        run.train(resume=True)
    assert first_line() == f"resuming after 3 steps from {checkpoints}/step-000003"
    for step in (2, 3):
        shutil.rmtree(checkpoints / f"step-{step:06d}")
    dropped = "; drops the records of 2 steps from step 1 on"
    assert first_line() == f"resuming after 1 steps from {checkpoints}/step-000001{dropped}"
    shutil.rmtree(checkpoints)
    begun = f"resuming: {folder} has no checkpoint, so the run begins again"
    assert first_line() == f"{begun}; drops the records of 3 steps from step 0 on"


@pytest.mark.parametrize(
    ("signals", "apart_s", "saved"), [(1, 1, "step-000001"), (2, 0, None), (2, 1, "step-000001")]
)
def test_a_second_ctrl_c_in_an_update_does_not_wait_for_it(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    signals: int,
    apart_s: float,
    saved: str | None,
) -> None:
    def interrupted(*args: Any, **more: Any) -> Any:
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        return update(*args, **more)

    update = LocalLearner.update
    monkeypatch.setattr(LocalLearner, "update", interrupted)
    monkeypatch.setattr(run_module, "AGAIN_S", apart_s)
    with pytest.raises(SystemExit) as ended:
        run.train()
    assert ended.value.code == 130
    newest = newest_checkpoint(run.folder)
    assert (newest and newest.name) == saved
    assert [row["step"] for row in rows(run.folder)] == [0] * bool(saved)
    said = capfd.readouterr().err
    assert "stopping after the update of step 0; Ctrl-C again stops at once, without it" in said
    assert "Traceback" not in said


def test_each_held_out_set_has_a_pass_rate_and_each_task_its_reward(run_with_workers: Run) -> None:
    story = {"name": "story", "options": {"train": 4, "heldout": 4}}
    *_, last = run_with_workers.train(
        steps=1,
        task={"name": "mix", "options": {"tale": story, "letters": {"name": "ascii"}}},
        rollout={"max_prompt_tokens": 400},
        evaluation={"every_steps": 1, "prompts": 2},
    )
    # So few tokens hold no story of 60 words.
    assert last["eval/tale/pass_rate"] == 0 < last["eval/letters/pass_rate"]
    assert last["eval/pass_rate"] == last["eval/letters/pass_rate"] / 2
    answers = read_rows(run_with_workers.folder / "responses.jsonl")
    assert {row["step"] for row in answers} == {0} and len(answers) == 8
    for row in answers:
        prompt = Prompt("p", "", (1,))
        expected = 0.0 if row["task"] == "tale" else ascii_task.reward(prompt, row["text"])
        assert row["reward"] == expected
