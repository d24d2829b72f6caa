"""Scores groups of rollouts in reward workers, so that no reward function can stop a training run.

In: groups, and a task's reward function. Out: one array of rewards per group, in the same order,
sub-scores, and counts of failures. A call that raises, crashes or hangs scores 0; a worker process
that has crashed or hangs is replaced. Where all calls fail there is nothing to learn from, and
`RewardsFailed` is raised.
"""

import inspect
import logging
import math
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.tasks.reward_worker import Job, Reward, Worker, reward_of
from sparrow_sglang.rl.types import Group

logger = logging.getLogger(__name__)

# Kinds of failures, and the metrics that count them.
FAILURES = {
    "errors": "sparrow/reward_errors",
    "crashes": "sparrow/reward_crashes",
    "timeouts": "sparrow/reward_timeouts",
}
# The number of a group, and the range of samples of it that one job scores.
Place = tuple[int, range]


class RewardsFailed(RuntimeError):
    """The reward function cannot be loaded, or failed for every response."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Rewards [n] float64 of each group, in the order given, and how many calls failed.

    `errors`: the function raised, or returned something else than finite numbers. `crashes`: its
    process died. `timeouts`: it took too long and was killed. All three score 0. `parts` are
    sub-scores by name, for each response of each group, if the reward gives any.
    """

    rewards: tuple[NDArray[np.float64], ...]
    parts: tuple[tuple[Mapping[str, float], ...], ...] = ()
    errors: int = 0
    crashes: int = 0
    timeouts: int = 0

    def metrics(self) -> dict[str, float]:
        """The number of responses whose scoring failed, by kind of failure."""
        return {name: float(getattr(self, kind)) for kind, name in FAILURES.items()}


def part_metrics(parts: Iterable[Iterable[Mapping[str, float]]]) -> dict[str, float]:
    """Means of sub-scores by name, over the responses that have them."""
    named: dict[str, list[float]] = {}
    for part in (part for group in parts for part in group):
        for name, value in part.items():
            named.setdefault(f"sparrow/score/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in named.items()}


class RewardPool:
    """Reward workers: processes that call `reward`, a function of a module, or a mapping with one
    such function for each task; a context manager, which ends them.

    Processes are started when first needed, from a server process that holds neither CUDA nor
    threads; a script that uses this needs the usual `if __name__ == "__main__"`.
    """

    def __init__(
        self,
        reward: Reward | Mapping[str, Reward],
        workers: int = 4,
        timeout_s: float = 30.0,
        total_timeout_s: float = 300.0,
    ) -> None:
        self.reward = reward
        self._count = workers
        self._timeout_s = timeout_s
        self.total_timeout_s = total_timeout_s
        self._workers: list[Worker] = []

    def score(self, groups: Sequence[Group]) -> Scores:
        """The reward of every rollout; those missing after `total_timeout_s` are timeouts.

        Raises `RewardsFailed`.
        """
        with self.scoring() as scoring:
            return scoring.scores([scoring.add(group) for group in groups])

    @contextmanager
    def scoring(self) -> Iterator["Scoring"]:
        """Score groups in a thread while others are still being sampled.

        Nothing else may be scored meanwhile. Groups that are not scored when the block ends are
        abandoned.
        """
        scoring = Scoring(self)
        try:
            yield scoring
        finally:
            scoring.stop()

    def _advance(self, work: "_Work", wake: Connection) -> None:
        """Hand out jobs, wait for a message of a worker or `wake`, or a deadline, and handle it."""
        if time.monotonic() > work.deadline:
            self._give_up(work)
            return
        while len(self._workers) < min(self._count, len(work.jobs)):
            self._workers.append(Worker(self.reward))
        for worker in self._workers:
            if work.jobs and worker.ready and id(worker) not in work.places:
                work.places[id(worker)] = work.jobs.popleft()
                worker.send(work.job(work.places[id(worker)]), self._timeout_s)
        for worker in self._changed(wake, work.deadline):
            kind, value = worker.outcome()
            place = work.places.pop(id(worker), None)
            if kind in ("crashes", "timeouts"):
                if place is None and not worker.ready:
                    self.close()
                    raise RewardsFailed(f"the reward {self.reward!r} cannot be loaded: {value}")
                worker.stop()
                self._workers[self._workers.index(worker)] = Worker(self.reward)
            if place is not None:
                work.take(place, kind, value)

    def _give_up(self, work: "_Work") -> None:
        """Count all jobs that are left as timeouts, and end the workers that still compute."""
        for worker in [one for one in self._workers if id(one) in work.places]:
            work.jobs.append(work.places.pop(id(worker)))
            worker.stop()
            self._workers.remove(worker)
        while work.jobs:
            work.take(work.jobs.popleft(), "timeouts", "the time for the step's rewards is over")

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _changed(self, wake: Connection, deadline: float) -> list[Worker]:
        """Wait until a worker has a message or is past its deadline, or `wake` has a message.

        Waits until `deadline` at most. Returns these workers; a message on `wake` is read and
        dropped.
        """
        busy = [worker for worker in self._workers if worker.deadline is not None]
        deadlines = [worker.deadline for worker in busy if worker.deadline is not None]
        end = min([deadline, *deadlines])
        limit = None if end == math.inf else max(0.0, end - time.monotonic())
        ready = wait([*(worker.connection for worker in busy), wake], limit)
        if wake in ready:
            wake.recv()
        now = time.monotonic()
        return [one for one in busy if one.connection in ready or (one.deadline or 0.0) <= now]


class _Work:
    """Groups, numbered in the order they are added, with their open jobs and their rewards."""

    def __init__(self, reward: Reward | Mapping[str, Reward]) -> None:
        self._reward = reward
        self.groups: list[Group] = []
        self.jobs: deque[Place] = deque()
        self.places: dict[int, Place] = {}
        self._rewards: list[NDArray[np.float64]] = []
        self._parts: list[list[Mapping[str, float]]] = []
        self._open: list[int] = []
        self._left = 0
        # When those that are missing are given up, in seconds of the monotonic clock.
        self.deadline = math.inf
        self._counts = dict.fromkeys(FAILURES, 0)
        self._last_failure = ""

    @property
    def done(self) -> bool:
        return not self._left

    def add(self, group: Group) -> None:
        number, size = len(self.groups), len(group.rollouts)
        self.groups.append(group)
        self._rewards.append(np.zeros(size))
        self._parts.append([{}] * size)
        self._open.append(size)
        self._left += size
        step = size if "texts" in self._parameters(group) else 1
        self.jobs.extend((number, range(i, i + step)) for i in range(0, size, step))

    def job(self, place: Place) -> Job:
        """The job in the form that a worker gets."""
        number, samples = place
        group = self.groups[number]
        rollouts = [group.rollouts[sample] for sample in samples]
        parameters = self._parameters(group)
        if "texts" in parameters:
            reasons = [rollout.finish_reason for rollout in rollouts]
            more = {"finish_reasons": reasons} if "finish_reasons" in parameters else {}
            prompts = [group.prompt] * len(rollouts)
            return group.prompt.task, (prompts, [rollout.text for rollout in rollouts]), more
        (rollout,) = rollouts
        known = {"finish_reason": rollout.finish_reason, "turns": rollout.turns}
        one = {name: value for name, value in known.items() if name in parameters}
        return group.prompt.task, (group.prompt, rollout.text), one

    def _parameters(self, group: Group) -> Collection[str]:
        return inspect.signature(reward_of(self._reward, group.prompt.task)).parameters

    def take(self, place: Place, kind: str, value: Any) -> None:
        """Store the outcome of a job."""
        number, samples = place
        if kind == "reward" and len(value) != len(samples):
            kind, value = "errors", f"{len(value)} rewards for {len(samples)} responses"
        if kind == "reward":
            for sample, (reward, parts) in zip(samples, value, strict=True):
                self._rewards[number][sample] = reward
                self._parts[number][sample] = parts
        else:
            prompt = self.groups[number].prompt
            self._last_failure = f"prompt {prompt.task}/{prompt.id}: {kind}: {value}"
            if not self._counts[kind]:
                logger.warning("reward failed, first of its kind: %s", self._last_failure)
            self._counts[kind] += len(samples)
        # Updated last, as another thread reads these to see whether the rewards are complete.
        self._open[number] -= len(samples)
        self._left -= len(samples)

    def rewards(self, number: int) -> NDArray[np.float64] | None:
        """Rewards of a group, None until all of its responses are scored."""
        return None if self._open[number] else self._rewards[number]

    def scores(self, numbers: Iterable[int]) -> Scores:
        count = sum(len(group.rollouts) for group in self.groups)
        if count and sum(self._counts.values()) == count:
            raise RewardsFailed(f"all {count} rewards failed, the last: {self._last_failure}")
        chosen = list(numbers)
        parts = tuple(tuple(self._parts[number]) for number in chosen)
        return Scores(tuple(self._rewards[number] for number in chosen), parts, **self._counts)


class Scoring:
    """Groups that a thread scores while more are added; see `RewardPool.scoring`."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._work = _Work(pool.reward)
        self._changed = threading.Condition()
        self._asleep, self._waker = multiprocessing.Pipe(duplex=False)
        self._added: deque[Group] = deque()
        self._count = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sparrow-rewards", daemon=True)
        self._thread.start()

    def add(self, group: Group) -> int:
        """Queue a group to be scored; returns its number, counted from 0."""
        self._added.append(group)
        self._waker.send(None)
        self._count += 1
        return self._count - 1

    def rewards(self, number: int) -> NDArray[np.float64] | None:
        """Rewards [n] of a group, None while some are missing."""
        with self._changed:
            return self._work.rewards(number) if number < len(self._work.groups) else None

    def wait(self) -> None:
        """Wait until all groups are scored, for `total_timeout_s` at most, after which those left
        are timeouts; raises what `RewardPool.score` raises."""
        self._work.deadline = time.monotonic() + self._pool.total_timeout_s
        self._waker.send(None)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (len(self._work.groups) == self._count and self._work.done)
            )
        self._work.deadline = math.inf
        if self._error is not None:
            raise self._error

    def scores(self, numbers: Iterable[int]) -> Scores:
        """Scores of these groups, in this order, with the failure counts of all groups."""
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
