"""Groups whose responses tell a reward function what to do, and scoring without processes."""

import os
import signal
import time
from collections.abc import Callable, Sequence
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
        self._rewards: list[Rewards] = []

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *error: Any) -> None: ...

    def add(self, group: Group) -> int:
        rewards = (self._reward(group.prompt, rollout.text) for rollout in group.rollouts)
        self._rewards.append(tuple(rewards))
        return len(self._rewards) - 1

    def scores(self, numbers: Sequence[int]) -> Scores:
        return Scores(tuple(self._rewards[number] for number in numbers))


def scores_of(groups: list[Group], reward: Callable[[Prompt, str], float]) -> Scores:
    at_once = AtOnce(reward)
    return at_once.scores([at_once.add(group) for group in groups])
