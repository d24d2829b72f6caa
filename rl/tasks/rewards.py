"""Scores groups of rollouts in reward workers, so that no reward function can stop a training run.

In: groups, and a task's reward function. Out: one array of rewards per group, in the same order,
and counts of what went wrong. A call that raises, crashes or hangs scores 0; its worker process is
replaced.
"""

import inspect
import logging
import math
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        work = _Work()
        for group in groups:
            work.add(group)
        while not work.done:
            self._advance(work)
        return work.scores(range(len(groups)))

    @contextmanager
    def scoring(self) -> Iterator["Scoring"]:
        """Score groups in a thread while others are still being sampled.

        Nothing else may be scored meanwhile. What is under way when the block raises is given up.
        """
        scoring = Scoring(self)
        try:
            yield scoring
        finally:
            scoring.stop()

    def _advance(self, work: "_Work", wake: Connection | None = None) -> None:
        """Hand out jobs, wait until a worker or `wake` has something to say, and take it in."""
        while len(self._workers) < min(self._count, len(work.jobs)):
            self._workers.append(_Worker(self._reward))
        for worker in self._workers:
            if work.jobs and worker.ready and id(worker) not in work.places:
                number, sample = work.places[id(worker)] = work.jobs.popleft()
                rollout = work.groups[number].rollouts[sample]
                more = {FINISH_REASON: rollout.finish_reason} if self._sees_finish_reason else {}
                worker.send((work.groups[number].prompt, rollout.text, more), self._timeout_s)
        for worker in self._changed(wake):
            kind, value = worker.outcome()
            place = work.places.pop(id(worker), None)
            if kind in ("crashes", "timeouts"):
                if place is None and not worker.ready:
                    self.close()
                    raise RuntimeError(f"the reward {self._reward!r} cannot be loaded: {value}")
                worker.stop()
                self._workers[self._workers.index(worker)] = _Worker(self._reward)
            if place is not None:
                work.take(place, kind, value)

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

    def _changed(self, wake: Connection | None) -> "list[_Worker]":
        """Workers with something to tell, or past their time; waits for the first one, or `wake`,
        which is read."""
        busy = [worker for worker in self._workers if worker.deadline is not None]
        deadlines = [worker.deadline for worker in busy if worker.deadline is not None]
        limit = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait([worker.connection for worker in busy] + ([wake] if wake else []), limit)
        if wake in ready:
            wake.recv()
        late = time.monotonic()
        return [
            worker
            for worker in busy
            if worker.connection in ready or (worker.deadline or 0.0) <= late
        ]


class _Work:
    """Groups, numbered as they come, what is still to be scored of them, and what has been."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.jobs: deque[tuple[int, int]] = deque()
        self.places: dict[int, tuple[int, int]] = {}
        self._rewards: list[NDArray[np.float64]] = []
        self._open: list[int] = []
        self._left = 0
        self._counts = {"errors": 0, "crashes": 0, "timeouts": 0}

    @property
    def done(self) -> bool:
        return not self._left

    def add(self, group: Group) -> None:
        number, size = len(self.groups), len(group.rollouts)
        self.groups.append(group)
        self._rewards.append(np.zeros(size))
        self._open.append(size)
        self._left += size
        self.jobs.extend((number, sample) for sample in range(size))

    def take(self, place: tuple[int, int], kind: str, value: Any) -> None:
        """The outcome of a job."""
        number, sample = place
        if kind == "reward":
            self._rewards[number][sample] = value
        else:
            self._counts[kind] += 1
            prompt = self.groups[number].prompt
            logger.warning("prompt %s/%s: %s: %s", prompt.task, prompt.id, kind, value)
        # Last, as another thread goes by these.
        self._open[number] -= 1
        self._left -= 1

    def rewards(self, number: int) -> NDArray[np.float64] | None:
        """Those of a group, None until all of its responses are scored."""
        return None if self._open[number] else self._rewards[number]

    def scores(self, numbers: Iterable[int]) -> Scores:
        return Scores(tuple(self._rewards[number] for number in numbers), **self._counts)


class Scoring:
    """Groups that a thread scores while more are added; see `RewardPool.scoring`."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._work = _Work()
        self._changed = threading.Condition()
        self._asleep, self._waker = multiprocessing.Pipe(duplex=False)
        self._added: deque[Group] = deque()
        self._count = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sparrow-rewards", daemon=True)
        self._thread.start()

    def add(self, group: Group) -> int:
        """The number of the group, counted from 0, which will be scored."""
        self._added.append(group)
        self._waker.send(None)
        self._count += 1
        return self._count - 1

    def rewards(self, number: int) -> NDArray[np.float64] | None:
        """Rewards [n] of a group, None while some are missing."""
        with self._changed:
            return self._work.rewards(number) if number < len(self._work.groups) else None

    def wait(self) -> None:
        """Until all groups are scored; raises what `RewardPool.score` raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._is_done())
        if self._error is not None:
            raise self._error

    def scores(self, numbers: Iterable[int]) -> Scores:
        """Of these groups, in this order, with the failures of all groups."""
        self.wait()
        return self._work.scores(numbers)

    def stop(self) -> None:
        """End the thread; workers that still compute a reward are replaced when next needed."""
        self._stopped = True
        self._waker.send(None)
        self._thread.join()
        if not self._work.done:
            self._pool.close()
        self._asleep.close()
        self._waker.close()

    def _is_done(self) -> bool:
        return len(self._work.groups) == self._count and self._work.done

    def _run(self) -> None:
        try:
            while not self._stopped:
                with self._changed:
                    while self._added:
                        self._work.add(self._added.popleft())
                    self._changed.notify_all()
                self._pool._advance(self._work, self._asleep)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


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
