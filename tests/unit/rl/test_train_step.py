"""A training step against a gradient by hand: advantages, correction, responses left out and
mini-batches together."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distillation import new_policy
from engines import random_prompt
from transformers import AutoModelForCausalLM

from sparrow_sglang.rl import trainer
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.policy import optimizer
from sparrow_sglang.rl.runs.checkpoint import State
from sparrow_sglang.rl.tasks.rewards import Scores
from sparrow_sglang.rl.trainer import Collected
from sparrow_sglang.rl.types import Group, Prompt, Rewards, Rollout

TEMPERATURE = 0.8
# The first group teaches nothing, and one reward is missing.
REWARDS: list[Rewards] = [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (None, 1.0, 0.0)]
ADVANTAGES = [(0, 0, 0), (2 / 3, -1 / 3, -1 / 3), (-2 / 3, 4 / 3, -2 / 3), (0, 0.5, -0.5)]


# Sample standard deviations of the known rewards.
DEVIATIONS = [1, (1 / 3) ** 0.5, (4 / 3) ** 0.5, 0.5**0.5]


class Clock:
    def __call__(self, stage: str) -> Any:
        return nullcontext()

    def metrics(self, tokens: int) -> dict[str, float]:
        return {}


def logprobs_of(model: Any, group: int, sample: int) -> torch.Tensor:
    prompt, response = ids_of(group, sample)
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    picked = torch.tensor(response)[:, None]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, picked)[:, 0]


def rollout_of(name: str, sample: int, ids: Any, logprobs: Any) -> Rollout:
    prompt, response = map(tuple, ids)
    return Rollout(name, sample, prompt, response, logprobs, "stop", "0", "dense", "")


def run_of(config: TrainConfig, policy: Any) -> Any:
    """What a step takes of a run."""
    setup = SimpleNamespace(schedule=None, train=[0] * 8, tokenizer=SimpleNamespace(decode=str))
    return SimpleNamespace(
        config=config,
        learner=LocalLearner(config, policy),
        setup=setup,
        state=State(),
        prompts_used=4,
        updating=nullcontext,
        log=SimpleNamespace(write=lambda *_: None, append=lambda *_: None),
    )


def ids_of(group: int, sample: int) -> tuple[list[int], list[int]]:
    number = 3 * group + sample
    return random_prompt(group, 9), random_prompt(50 + number, 5 + 3 * number % 11)


@pytest.mark.parametrize(("mini_batches", "normalised"), [(1, True), (2, True), (2, False)])
def test_a_step_takes_the_gradient_of_the_corrected_loss(
    sharp_llama: str, monkeypatch: pytest.MonkeyPatch, mini_batches: int, normalised: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(sharp_llama, dtype=torch.float32)
    policy = new_policy(sharp_llama, micro_batch_tokens=60)
    draw = np.random.default_rng(0)
    groups, offsets = [], {}
    for number, _ in enumerate(REWARDS):
        rollouts = []
        for sample in range(3):
            prompt, response = ids_of(number, sample)
            # The actor gave each token five nats more or less than the policy does.
            offset = 5.0 * draw.choice([-1, 1], len(response))
            offsets[number, sample] = torch.tensor(offset)
            with torch.no_grad():
                dense = logprobs_of(model, number, sample).numpy()
            rollouts.append(rollout_of(f"{number}", sample, (prompt, response), dense + offset))
        groups.append(Group(Prompt(f"{number}", "t", tuple(prompt)), tuple(rollouts)))

    found: list[dict[str, torch.Tensor]] = []

    def no_step(self: Any) -> float:
        found.append({name: one.grad.clone() for name, one, _ in policy.named_parameters()})
        self.zero_grad()
        return 1.0

    monkeypatch.setattr(optimizer.ClippedAdamW, "clipped_step", no_step)
    fields = {
        "run_dir": "unused",
        "task": {"name": "story"},
        "rollout": {"temperature": TEMPERATURE, "prompts_per_step": 4, "samples_per_prompt": 3},
        "algorithm": {"std_normalisation": normalised, "mini_batches": mini_batches},
        "mismatch": {"sequences": 0},
        "logging": {"response_groups": 0},
    }
    config = TrainConfig.parse(fields)
    run = run_of(config, policy)
    trainer.train_step(run, 0, Collected(groups, Scores(tuple(REWARDS))), Clock())

    for part, numbers in enumerate({1: [range(4)], 2: [range(2), range(2, 4)]}[mini_batches]):
        model.zero_grad()
        loss, tokens = torch.zeros(()), 0
        for number in numbers:
            for sample, reward in enumerate(REWARDS[number]):
                if number == 0 or reward is None:
                    continue
                weights = (-offsets[number, sample]).exp().clamp(max=2.0)
                logprobs = logprobs_of(model, number, sample)
                advantage = ADVANTAGES[number][sample] / (DEVIATIONS[number] if normalised else 1)
                loss = loss - advantage * (weights * logprobs).sum()
                tokens += len(logprobs)
        (loss / tokens).backward()
        largest = max(float(one.grad.abs().max()) for one in model.parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                found[part][name], parameter.grad, atol=1e-4 * largest, rtol=1e-3
            )
    assert len(found) == mini_batches
    assert run.state.step == 1


def test_a_log_prob_that_is_not_finite_is_named_before_the_run_advances(
    sharp_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group outside of the loss; such responses alone are scored before the update."""
    groups = []
    for group in range(2):
        prompt, response = ids = ids_of(group, 0)
        nothing = np.zeros(len(response))
        rollouts = tuple(rollout_of(f"p{group}", i, ids, nothing) for i in range(2))
        groups.append(Group(Prompt(f"p{group}", "t", tuple(prompt)), rollouts))
    policy = new_policy(sharp_llama)
    score = policy.score

    def damaged(*arguments: Any) -> Any:
        logprobs, entropies = score(*arguments)
        logprobs[0][2] = torch.nan
        return logprobs, entropies

    monkeypatch.setattr(policy, "score", damaged)
    fields = {"run_dir": "unused", "task": {"name": "story"}, "mismatch": {"sequences": 0}}
    config = TrainConfig.parse(fields)
    before = {name: one.clone() for name, one in policy.named_weights()}
    run = run_of(config, policy)
    collected = Collected(groups, Scores(((1.0, 1.0), (1.0, 0.0))))
    with pytest.raises(FloatingPointError, match="step 3, prompt 'p0', sample 0: .* of"):
        trainer.train_step(run, 3, collected, Clock())
    assert run.state == State()
    for name, one in policy.named_weights():
        assert torch.equal(one, before[name]), name
