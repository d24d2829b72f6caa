"""Runs of several ranks write what a run of one writes, and are resumed by any number of ranks.

All ranks end together. Engines are stand-ins that draw the same samples whichever rank asks.
"""

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import ascii_task
import pytest
import torch
from ascii_task import rows
from processes_of_a_run import on_ranks
from reward_groups import scores_of
from sampler import TOKENS, Sampler
from transformers import AutoModelForCausalLM

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl import trainer
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs import launch, run
from sparrow_sglang.rl.tasks import TASKS
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Prompt, Rollout

DISTILL = {
    "distill": {"enabled": True, "rank": 2, "sequences": 4, "lr": 1e-3, "policy_loss": 0.5},
}
# From a schedule that reads everything to one that does not, after the first step.
LADDER = {
    "engine": {"schedule": "fixed-64"},
    "ladder": {"schedules": ["fixed-48"], "target": 0.01, "patience": 1, "min_tokens": 1},
}


class Repeatable(Sampler):
    """Samples depend on weights, prompt and number alone."""

    def _sample(self, prompt: Prompt, sample: int, *rest: Any) -> Rollout:
        torch.manual_seed(1000 * int(prompt.id) + 10 * sample + int(self.version))
        return super()._sample(prompt, sample, *rest)

    def set_schedule(self, schedule: Any) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Under a fixed schedule the first sparse layer is the third one.
    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3}
    return ascii_task.save_model_of_bytes(
        tmp_path_factory.mktemp("bytes"), **sizes, intermediate_size=64, num_key_value_heads=1
    )


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "open_engine", Repeatable)
    monkeypatch.setitem(TASKS, ascii_task.NAME, ascii_task.load)
    score = partial(scores_of, reward=ascii_task.reward)
    monkeypatch.setattr(RewardPool, "score", lambda pool, groups: score(groups))


def train(config: TrainConfig, resume: bool = False) -> Path | None:
    # The adapter's weights are drawn at the start.
    torch.manual_seed(0)
    return trainer.train(config, resume)


def settings(model: str, run_dir: Path, **sections: Any) -> TrainConfig:
    fields = {
        "run_dir": run_dir,
        "steps": 2,
        "task": {"name": ascii_task.NAME},
        "model": {"path": model, "gradient_checkpointing": False, "micro_batch_tokens": 200},
        "engine": {"schedule": "fixed-48"},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 3,
            "max_prompt_tokens": 64,
            "max_new_tokens": TOKENS,
        },
        "mismatch": {"sequences": 3},
        "optimizer": {"lr": 1e-4},
        "evaluation": {"every_steps": 0, "prompts": 3},
        "logging": {"tensorboard": False},
        "checkpoint": {"every_steps": 1},
    }
    return TrainConfig.parse(fields | sections)


def untimed(run_dir: Path) -> list[dict[str, float]]:
    timed = ("timing_s/", "sparrow/rollout_tokens_per_s")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in rows(run_dir)
    ]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step-{step:06d}" / "model"
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"mini_batches": 2}, "evaluation": {"every_steps": 2, "prompts": 3}}
        | DISTILL,
        {"algorithm": {"old_logprobs": "update", "kl_coefficient": 0.1}} | LADDER,
    ],
    ids=["distill", "ladder"],
)
def test_two_ranks_report_and_save_what_one_does(
    model: str, tmp_path: Path, sections: dict[str, Any]
) -> None:
    one, two = (settings(model, tmp_path / name, **sections) for name in ("one", "two"))
    train(one)
    folders = on_ranks(2, lambda: train(two), tmp_path / "ranks")
    assert folders == [two.run_dir / "checkpoints" / "step-000002"] * 2
    for alone, both in zip(untimed(one.run_dir), untimed(two.run_dir), strict=True):
        assert both == pytest.approx(alone, rel=1e-5, abs=1e-5)
    for name, weight in weights(one.run_dir, 2).items():
        torch.testing.assert_close(weights(two.run_dir, 2)[name], weight, atol=1e-5, rtol=1e-5)


def test_a_run_goes_on_with_any_number_after_a_rank_was_killed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(model, tmp_path / "whole", **DISTILL, steps=3)
    train(whole)
    config = settings(model, tmp_path / "parts", **DISTILL, steps=3)
    step = torch.optim.AdamW.step

    def doomed(optimizer: Any, *args: Any) -> Any:
        result = step(optimizer, *args)
        if os.environ.get("DOOMED") and max(s["step"] for s in optimizer.state.values()) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def second_is_killed() -> None:
        if os.environ["RANK"] == "1":
            os.environ["DOOMED"] = "yes"
        train(config)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", doomed)
        first, second = on_ranks(2, second_is_killed, tmp_path / "killed")
    assert (first, second) == (1, -signal.SIGKILL)
    assert len(rows(config.run_dir)) == 1
    # Resume with one rank, then with two.
    train(config.model_copy(update={"steps": 2}), resume=True)
    on_ranks(2, lambda: train(config, resume=True), tmp_path / "resumed")
    for alone, parts in zip(untimed(whole.run_dir), untimed(config.run_dir), strict=True):
        assert parts == pytest.approx(alone, rel=1e-5, abs=1e-5)
    for name, weight in weights(whole.run_dir, 3).items():
        torch.testing.assert_close(weights(config.run_dir, 3)[name], weight, atol=1e-5, rtol=1e-5)


SLEEPER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if os.environ["RANK"] == "1" and "doomed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(600)
"""
MEETS = """
import sys
from sparrow_sglang.rl.ranks import joined
with joined() as ranks:
    open(sys.argv[1] + str(ranks.rank), "w").write(str(ranks.each(ranks.rank)))
"""


def launched(program: str, folder: Path, *words: str) -> tuple[int, str]:
    return launch.launch([sys.executable, "-c", program, f"{folder}/", *words], 2)


def test_the_ranks_of_a_launch_meet(tmp_path: Path) -> None:
    assert launched(MEETS, tmp_path) == (0, "")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[0, 1]", "[0, 1]"]


def test_the_ranks_of_a_launch_end_together(tmp_path: Path) -> None:
    began = time.monotonic()
    assert launched(SLEEPER, tmp_path, "doomed") == (1, "error: rank 1 was killed by SIGKILL")
    (tmp_path / "0").unlink(missing_ok=True)

    def ask_once_both_wait() -> None:
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask_once_both_wait).start()
    assert launched(SLEEPER, tmp_path) == (143, "stopped")
    assert time.monotonic() - began < 300


def test_a_process_by_itself_is_no_run_of_two(model: str, tmp_path: Path) -> None:
    config = settings(model, tmp_path / "run", distributed={"ranks": 2})
    with pytest.raises(InputError, match="distributed.ranks=2: this is a process by itself"):
        trainer.train(config)


def test_two_ranks_refuse_a_checkpoint_that_one_wrote_before_there_were_ranks(
    model: str, tmp_path: Path
) -> None:
    config = settings(model, tmp_path / "run")
    folder = config.run_dir / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"config": config.model_dump(mode="json")}))
    with pytest.raises(InputError, match="was written before runs had ranks; go on with 1"):
        launch.check(config, 2, resume=True)
