"""examples/stability: its task, its model, and the settings of its runs."""

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import study
import torch
from study import Walk, draw_walk, draw_walks, make_tokenizer, reward

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.tasks import ChatRender, load_task
from sparrow_sglang.rl.types import Prompt

SETTINGS: dict[str, Any] = tomllib.loads(study.SETTINGS.read_text())
OPTIONS = {"least_nodes": 4, "most_nodes": 6, "names": 12, "steps": 4}
OPTIONS |= {"train": 5, "heldout": 3, "seed": 7}


def asked(walk: Walk, steps: int) -> Prompt:
    return Prompt("", "", (0,), walk.payload(steps))


def test_the_right_response_has_all_of_the_reward_and_a_wrong_line_costs_itself_only() -> None:
    walk = draw_walk(random.Random(0), 20, 8, 5)
    right = walk.response()
    assert reward(asked(walk, 5), right) == 1.0
    assert reward(asked(walk, 10), right) == 0.5
    lines = right.split(" ; ")
    # The second line leads elsewhere; the third goes on from where the second should have led.
    elsewhere = next(edge for edge in walk.edges if edge[0] != walk.lines[1][0])
    lines[1] = " ".join(elsewhere)
    assert reward(asked(walk, 5), " ; ".join(lines)) == pytest.approx(3 / 5)
    assert reward(asked(walk, 5), "") == 0.0


def test_every_node_of_a_graph_has_one_edge_in_and_one_out() -> None:
    walk = draw_walk(random.Random(1), 20, 8, 12, labels=2)
    assert sorted(edge[0] for edge in walk.edges) == sorted(edge[1] for edge in walk.edges)
    assert len({edge[0] for edge in walk.edges}) == 8
    for line, following in zip(walk.lines, walk.lines[1:], strict=False):
        assert line[1] == following[0] and line in walk.edges and len(line) == 4


def test_held_out_walks_stay_the_same_whatever_the_number_of_others() -> None:
    assert draw_walks(OPTIONS, 3, 7) == draw_walks(OPTIONS, 8, 7)[:3]


def values(arm: str, tmp_path: Path) -> dict[str, Any]:
    flat = study.run_settings(SETTINGS, arm, 3, tmp_path)
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        table = nested
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    return nested


@pytest.mark.parametrize("arm", SETTINGS["arms"])
def test_every_arm_is_a_run_that_sparrow_train_takes(arm: str, tmp_path: Path) -> None:
    config = TrainConfig.parse(values(arm, tmp_path), arm)
    assert (config.seed, config.run_dir.name) == (3, f"{arm}-seed3")
    options = config.task.options
    longest = draw_walk(random.Random(0), options["names"], options["most_nodes"], 96)
    tokenizer = make_tokenizer(options["names"])
    # Right responses are never cut, and no prompt is too long.
    assert len(tokenizer(longest.response()).input_ids) == config.rollout.max_new_tokens
    assert len(tokenizer(longest.prompt()).input_ids) == config.rollout.max_prompt_tokens
    ends = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    assert ends < SETTINGS["model"]["max_position_embeddings"]


def test_a_pretrained_model_and_the_runs_task_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**SETTINGS["model"], "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    model |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    plan = {**SETTINGS["pretrain"], "tokens_per_step": 60, "steps": 20, "evaluate_every": 1}
    # Losses below 10 let graphs grow at once, and any reward is enough.
    plan |= {"grow_below": 10.0, "evaluate_walks": 2, "evaluate_lines": 2, "reward": 0.0}
    settings = {"model": model, "pretrain": plan, "train": {"task": {"options": OPTIONS}}}
    study.pretrain(settings, tmp_path)
    assert "reward" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = TrainConfig.parse(
        {"run_dir": tmp_path, "steps": 1, "task": {"name": "study:load", "options": OPTIONS}}, ""
    )
    task = load_task(config.task, ChatRender(tokenizer))
    assert (len(task.train), len(task.heldout)) == (5, 3)
    walk = draw_walks(OPTIONS, 1, 7)[0]
    assert tokenizer.decode(task.heldout[0].input_ids) == walk.prompt()
    assert task.reward(task.heldout[0], walk.response()) == 1.0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(torch.tensor([task.heldout[0].input_ids])).logits.shape[-1] == len(tokenizer)


def test_a_reward_that_is_not_reached_ends_the_study(tmp_path: Path) -> None:
    model = {**SETTINGS["model"], "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    plan = {**SETTINGS["pretrain"], "tokens_per_step": 60, "steps": 2}
    settings = {"model": model, "pretrain": plan, "train": {"task": {"options": OPTIONS}}}
    with pytest.raises(SystemExit, match="reward of 0.5 was not reached in 2 steps"):
        study.pretrain(settings, tmp_path / "model")
    assert not (tmp_path / "model").exists()
