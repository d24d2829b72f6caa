"""Groups whose responses tell a reward function what to do, and scoring without processes."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sparrow_sglang.rl.tasks.rewards import Scores
from sparrow_sglang.rl.types import Group, Prompt, Rewards, Rollout


def obey(prompt: Prompt, text: str) -> float:
    """A reward function that does what the response text says."""
    if text == "raise":
        raise ValueError("no reward")
    if text == "nan":
        return float("nan")
    if text == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        os._exit(0)
    if text == "hang":
        # Block all signals, so that only SIGKILL ends the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)
    if text.startswith("slow "):
        time.sleep(0.2)
    return float(text.split()[-1]) + prompt.payload["offset"]


def group(name: str, offset: float, texts: list[str], finish_reason: str = "stop") -> Group:
    prompt = Prompt(name, "test", (1,), {"offset": offset})
    rollouts = [
        Rollout(name, i, (1,), (2,), np.zeros(1, np.float32), finish_reason, "0", "dense", text)
        for i, text in enumerate(texts)
    ]
    return Group(prompt, tuple(rollouts))


class AtOnce:
    """Scoring without processes, so that nothing depends on the order of completion."""

    def __init__(self, reward: Callable[[Prompt, str], float]) -> None:
        self._reward = reward
        self._rewards: dict[int, Rewards] = {}

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *error: Any) -> None: ...

    def add(self, position: int, group: Group) -> None:
        rewards = (self._reward(group.prompt, rollout.text) for rollout in group.rollouts)
        self._rewards[position] = tuple(rewards)

    def scores(self) -> Scores:
        return Scores(tuple(rewards for _, rewards in sorted(self._rewards.items())))


def scores_of(groups: list[Group], reward: Callable[[Prompt, str], float]) -> Scores:
    at_once = AtOnce(reward)
    for position, group in enumerate(groups):
        at_once.add(position, group)
    return at_once.scores()
