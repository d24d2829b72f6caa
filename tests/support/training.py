"""Shared by the tests of training: prompts, engine arguments, run settings, expected log-probs."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import ascii_task
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from engines import random_prompt

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.rollout import RolloutEngine, Sampling
from sparrow_sglang.rl.types import Group, Prompt

PROMPTS = [Prompt(f"p{i}", "test", tuple(random_prompt(i, 70 + 9 * i))) for i in range(3)]
# Reads every page of the tests' sequences, so that sparse decode is dense decode.
ALL = "fixed-4096"


def settings(model: str, run_dir: Path, schedule: str, *parts: dict, **sections) -> TrainConfig:
    """The settings below, where `parts` and then `sections` replace fields of a section."""
    fields = {
        "run_dir": run_dir,
        "steps": 6,
        "task": {"name": ascii_task.NAME, "reward_workers": 1},
        "model": {"path": model, "gradient_checkpointing": False},
        "engine": {
            "schedule": schedule,
            "server_args": {
                "max_total_tokens": 8192,
                "max_running_requests": 16,
                # A grammar backend needs an end-of-text token, which this tokenizer does not have.
                "grammar_backend": "none",
            },
        },
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 64,
            "max_new_tokens": 60,
        },
        "optimizer": {"lr": 5e-3},
        "mismatch": {"sequences": 16},
        "evaluation": {"every_steps": 3},
    }
    for part in (*parts, sections):
        for name, section in part.items():
            known = fields.get(name)
            fields[name] = known | section if isinstance(known, dict) else section
    return TrainConfig.parse(fields)


def optimizer_steps(checkpoint: Path) -> set[int]:
    """The step counts of AdamW over all weights."""
    stored = dcp.FileSystemReader(checkpoint / "training").read_metadata().state_dict_metadata
    steps = {name: torch.empty(()) for name in stored if name.endswith(".step")}
    dcp.load(steps, checkpoint_id=checkpoint / "training", no_dist=True)
    return {int(count) for count in steps.values()}


@torch.no_grad()
def scaled(model):
    """A copy of a model with other weights."""
    changed = deepcopy(model)
    torch.manual_seed(1)
    for weight in changed.parameters():
        weight.mul_(1 + 0.3 * torch.randn_like(weight))
    return changed


@torch.no_grad()
def transformers_logprobs(model, rollout, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the sampled tokens, given all tokens before them."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    start = len(rollout.prompt_ids)
    logits = model(ids).logits[0, start - 1 : -1].double() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, start:, None])[:, 0].numpy()


def error(model, groups) -> float:
    """Largest difference of a recorded log-prob from the transformers model's."""
    return max(
        np.abs(rollout.logprobs - transformers_logprobs(model, rollout)).max()
        for group in groups
        for rollout in group.rollouts
    )


def generate(
    engine: RolloutEngine, prompts: Sequence[Prompt], n: int, sampling: Sampling
) -> list[Group]:
    """One group of `n` samples per prompt, in the order of the prompts."""
    groups = dict(engine.stream(prompts, n, sampling))
    return [groups[position] for position in range(len(prompts))]
