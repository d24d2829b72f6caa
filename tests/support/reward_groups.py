"""Groups whose responses say what a reward function shall do with them."""

import os
import signal
import time

import numpy as np

from sparrow_sglang.rl.types import Group, Prompt, Rollout


def obey(prompt: Prompt, text: str) -> float:
    """Does what the text says."""
    if text == "raise":
        raise ValueError("no reward")
    if text == "nan":
        return float("nan")
    if text == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        os._exit(0)
    if text == "hang":
        # Not to be interrupted by anything milder than a kill.
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
