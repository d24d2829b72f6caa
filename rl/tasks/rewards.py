"""Scores groups of rollouts in reward workers, so that no reward function can stop a training run.

In: groups, and a task's reward function. Out: one array of rewards per group, in the same order,
and counts of what went wrong. A call that raises, crashes or hangs scores 0; its worker process is
replaced.
"""

import inspect
import logging
import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.types import Group, Prompt

logger = logging.getLogger(__name__)

# (prompt, text) -> reward; one with a parameter `finish_reason` gets SGLang's, too.
Reward = Callable[..., float]
FINISH_REASON = "finish_reason"
# To import the reward function, and sympy among others, before the first job.
START_UP_S = 120.0


@dataclass(frozen=True, eq=False)
class Scores:
    """Rewards [n] float64 of each group, in the order given, and how many calls failed.

    `errors`: the function raised, or returned something else than a finite number. `crashes`: its
    process died. `timeouts`: it was killed. All three scored 0.
    """

    rewards: tuple[NDArray[np.float64], ...]
    errors: int = 0
    crashes: int = 0
    timeouts: int = 0

    def metrics(self) -> dict[str, float]:
        """Failed calls of each kind."""
        return {
            "sparrow/reward_errors": float(self.errors),
            "sparrow/reward_crashes": float(self.crashes),
            "sparrow/reward_timeouts": float(self.timeouts),
        }


def without_truncated(
    rewards: Sequence[NDArray[np.float64]], groups: Sequence[Group]
) -> tuple[NDArray[np.float64], ...]:
    """The same rewards [n] of each group, but 0 for responses that were cut at the length limit."""
    return tuple(
        np.where([rollout.truncated for rollout in group.rollouts], 0.0, values)
        for values, group in zip(rewards, groups, strict=True)
    )


class RewardPool:
    """Reward workers: processes that call `reward`, a function of a module; closes as a context.

    Processes are started at the first call of `score`, from a server process that holds neither
    CUDA nor threads; a script that uses this needs the usual `if __name__ == "__main__"`.
    """

    def __init__(self, reward: Reward, workers: int = 4, timeout_s: float = 30.0) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"workers={workers}, timeout_s={timeout_s}: expected at least one process and a"
                f" time above 0"
            )
        self._reward = reward
        self._sees_finish_reason = FINISH_REASON in inspect.signature(reward).parameters
        self._count = workers
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []

    def score(self, groups: Sequence[Group]) -> Scores:
        """The reward of every rollout.

        Raises `RuntimeError` if a process cannot even load the function.
        """
        rewards = [np.zeros(len(group.rollouts)) for group in groups]
        counts = {"errors": 0, "crashes": 0, "timeouts": 0}
        jobs = deque((i, j) for i, group in enumerate(groups) for j in range(len(group.rollouts)))
        places: dict[int, tuple[int, int]] = {}
        while len(self._workers) < min(self._count, len(jobs)):
            self._workers.append(_Worker(self._reward))
        while jobs or places:
            for worker in self._workers:
                if jobs and worker.ready and id(worker) not in places:
                    i, j = places[id(worker)] = jobs.popleft()
                    rollout = groups[i].rollouts[j]
                    more = {FINISH_REASON: rollout.finish_reason}
                    job = (groups[i].prompt, rollout.text, more if self._sees_finish_reason else {})
                    worker.send(job, self._timeout_s)
            for worker in self._changed():
                kind, value = worker.outcome()
                place = places.pop(id(worker), None)
                if kind in ("crashes", "timeouts"):
                    if place is None and not worker.ready:
                        self.close()
                        raise RuntimeError(f"the reward {self._reward!r} cannot be loaded: {value}")
                    worker.stop()
                    self._workers[self._workers.index(worker)] = _Worker(self._reward)
                if place is None:
                    continue
                if kind == "reward":
                    rewards[place[0]][place[1]] = value
                else:
                    counts[kind] += 1
                    prompt = groups[place[0]].prompt
                    logger.warning("prompt %s/%s: %s: %s", prompt.task, prompt.id, kind, value)
        return Scores(tuple(rewards), **counts)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _changed(self) -> "list[_Worker]":
        """Workers with something to tell, or past their time; waits for the first one."""
        busy = [worker for worker in self._workers if worker.deadline is not None]
        soonest = min(worker.deadline for worker in busy if worker.deadline is not None)
        ready = wait([worker.connection for worker in busy], max(0.0, soonest - time.monotonic()))
        late = time.monotonic()
        return [
            worker
            for worker in busy
            if worker.connection in ready or (worker.deadline or 0.0) <= late
        ]


class _Worker:
    """One process and what it is at; `deadline` is None while it has nothing to do."""

    def __init__(self, reward: Reward) -> None:
        # A forked trainer would carry threads and a CUDA context that its child cannot use.
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may not start processes, as a reward may.
        self._process = context.Process(target=_answer, args=(theirs, reward), daemon=False)
        self._process.start()
        theirs.close()
        self.ready = False
        self.deadline: float | None = time.monotonic() + START_UP_S

    def send(self, job: tuple[Prompt, str, dict[str, str]], timeout_s: float) -> None:
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


def _answer(connection: Connection, reward: Reward) -> None:
    """Answer jobs until the trainer is gone."""
    connection.send(("ready", None))
    while True:
        try:
            prompt, text, more = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            value = float(reward(prompt, text, **more))
            problem = None if math.isfinite(value) else f"returned {value}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        connection.send(("errors", problem) if problem else ("reward", value))
