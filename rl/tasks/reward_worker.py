"""One process that calls reward functions, and can be killed.

In: jobs. Out: rewards with their sub-scores, or what went wrong.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

# (prompt, text) -> reward, or a mapping of "score" and sub-scores; with a parameter
# `finish_reason` it gets SGLang's, too, and as `turns` all of the model's turns, of which the text
# is the last. A function (prompts, texts), with `finish_reasons` if it likes, gets all responses of
# a group at once, and returns a reward for each.
Reward = Callable[..., Any]
# Task, the reward's positional arguments, and the others.
Job = tuple[str, tuple[Any, Any], dict[str, Any]]
# To import the reward function, and sympy among others, before the first job.
START_UP_S = 120.0


class Worker:
    """One process and what it is at; `deadline` is None while it has nothing to do."""

    def __init__(self, reward: Reward | Mapping[str, Reward]) -> None:
        # A forked trainer would carry threads and a CUDA context that its child cannot use.
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may not start processes, as a reward may.
        self._process = context.Process(target=_answer, args=(theirs, reward), daemon=False)
        self._process.start()
        theirs.close()
        self.ready = False
        self.deadline: float | None = time.monotonic() + START_UP_S

    def send(self, job: Job, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        try:
            self.connection.send(job)
        except (BrokenPipeError, ConnectionResetError):
            # `outcome` finds the end of the connection, and says how the process ended.
            pass

    def outcome(self) -> tuple[str, Any]:
        """("ready" | "reward" | "errors" | "crashes" | "timeouts", value or reason)."""
        self.deadline = None
        if not self.connection.poll():
            return "timeouts", "no reward in time"
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return "crashes", f"the process ended with status {self._process.exitcode}"
        self.ready = True
        return kind, value

    def stop(self) -> None:
        """Kill the process; it holds nothing that needs saving."""
        self.connection.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def reward_of(reward: Reward | Mapping[str, Reward], task: str) -> Reward:
    """The reward function of a task."""
    return reward[task] if isinstance(reward, Mapping) else reward


def _answer(connection: Connection, reward: Reward | Mapping[str, Reward]) -> None:
    """Answer jobs until the trainer is gone."""
    connection.send(("ready", None))
    while True:
        try:
            task, arguments, more = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            result = reward_of(reward, task)(*arguments, **more)
            results = list(result) if isinstance(arguments[1], list) else [result]
            answer: tuple[str, Any] = "reward", [_split(value) for value in results]
        except Exception as error:
            answer = "errors", f"{type(error).__name__}: {error}"
        connection.send(answer)


def _split(value: Any) -> tuple[float, dict[str, float]]:
    """Reward and sub-scores."""
    parts = {**value} if isinstance(value, Mapping) else {"score": value}
    numbers = {name: float(part) for name, part in parts.items()}
    if "score" not in numbers or not all(map(math.isfinite, numbers.values())):
        raise ValueError(
            f"returned {value}: expected a finite number, or some, one of them 'score'"
        )
    return numbers.pop("score"), numbers
