"""Scores groups in reward workers, so that no reward function can stop a training run. A reward
that could not be computed is missing, not 0. A response that hangs or crashes the function earns
the lowest reward of its task so far, that of an empty response included, at most 0; the worker
process is replaced."""

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sparrow_sglang.rl.tasks.reward_worker import Job, Outcome, Reward, Worker, reward_of
from sparrow_sglang.rl.types import Group, Rewards

Names = tuple[tuple[str, str], str]
"""Of what a reward receives by position, and of what it receives if it has the parameter."""

logger = logging.getLogger(__name__)

# Kinds of failures, and the metrics that count them.
FAILURES = {
    "errors": "sparrow/reward_errors",
    "crashes": "sparrow/reward_crashes",
    "timeouts": "sparrow/reward_timeouts",
    "late": "sparrow/reward_late",
}
MAX_MISSING = 0.5
"""Share of missing rewards above which the run ends."""
_BLAMED = ("crashes", "timeouts")
_POLL_S = 0.1


class RewardsFailed(RuntimeError):
    """The reward function cannot be loaded, or too many rewards are missing."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Rewards of each group, and failed calls by reason. `errors` (an exception, or no finite
    numbers) and `late` (the step's time was over) are missing; `crashes` (the process died, twice)
    and `timeouts` earn the lowest reward. `parts` are sub-scores by name."""

    rewards: tuple[Rewards, ...]
    parts: tuple[tuple[Mapping[str, float], ...], ...] = ()
    errors: int = 0
    crashes: int = 0
    timeouts: int = 0
    late: int = 0

    def metrics(self) -> dict[str, float]:
        return {name: float(getattr(self, kind)) for kind, name in FAILURES.items()}


def part_metrics(parts: Iterable[Iterable[Mapping[str, float]]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for part in (part for group in parts for part in group):
        for name, value in part.items():
            by_name.setdefault(f"sparrow/score/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in by_name.items()}


class RewardPool:
    """Processes that call `reward`, a function of a module, or a mapping with one for each task.
    They start when first needed, without CUDA or threads; a script that uses this needs the usual
    `if __name__ == "__main__"`."""

    def __init__(
        self,
        reward: Reward | Mapping[str, Reward],
        workers: int = 4,
        timeout_s: float = 30.0,
        total_timeout_s: float = 300.0,
        lowest: dict[str, float] | None = None,
    ) -> None:
        """`lowest` rewards by task, at most 0, are kept up to date."""
        self.reward = reward
        self.total_timeout_s = total_timeout_s
        self._timeout_s = timeout_s
        # Each thread waits for one process at a time.
        self._threads = ThreadPoolExecutor(workers, "sparrow-rewards")
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self.lowest = {} if lowest is None else lowest
        self._lock = threading.Lock()

    def score(self, groups: Sequence[Group]) -> Scores:
        """Raises `RewardsFailed`."""
        with self.scoring() as scoring:
            for position, group in enumerate(groups):
                scoring.add(position, group)
            return scoring.scores()

    @contextmanager
    def scoring(self) -> Iterator["Scoring"]:
        """Score groups while others are sampled; nothing else may be scored meanwhile. Groups not
        scored when the block ends are abandoned."""
        scoring = Scoring(self)
        try:
            yield scoring
        finally:
            self.abandon(scoring.jobs)

    def submit(self, job: Job) -> "Future[Outcome]":
        """Have a worker score `job`; the future raises `RewardsFailed`."""
        return self._threads.submit(self._run, job)

    def _run(self, job: Job) -> Outcome:
        kind, value = self._call(job)
        if kind == "crashes":
            # Not the response's fault if the machine was short of memory.
            kind, value = self._call(job)
        self._note_lowest(job[0], kind, value)
        task, (prompt, text), keywords = job
        if kind in _BLAMED and text and not isinstance(text, list):
            # Another response may not have been wrong yet.
            self._note_lowest(task, *self._call((task, (prompt, ""), keywords)))
        return kind, value

    def _note_lowest(self, task: str, kind: str, value: Any) -> None:
        if kind == "reward":
            known = [reward for reward, _ in value if reward is not None]
            with self._lock:
                self.lowest[task] = min(self.lowest.get(task, 0.0), *known, 0.0)

    def _call(self, job: Job) -> Outcome:
        with self._lock:
            worker = self._idle.pop() if self._idle else Worker(self.reward)
            self._busy.add(worker)
        kind, value = worker.score(job, self._timeout_s)
        with self._lock:
            self._busy.remove(worker)
            if kind in ("reward", "errors") and not worker.ended:
                self._idle.append(worker)
                return kind, value
        worker.end()
        if kind == "unloaded":
            raise RewardsFailed(f"the reward {self.reward!r} cannot be loaded: {value}")
        return kind, value

    def abandon(self, jobs: "Iterable[Future[Outcome]]") -> None:
        """Cancel jobs that are not done, and end the workers that compute one."""
        left = [job for job in jobs if not job.done() and not job.cancel()]
        while left:
            with self._lock:
                for worker in self._busy:
                    worker.end()
            left = list(wait(left, _POLL_S).not_done)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._idle:
            worker.end()
        self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Scoring:
    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        # By position a group, and its jobs with the samples that each scores.
        self._groups: dict[int, tuple[Group, list[tuple[range, Future[Outcome]]]]] = {}

    def add(self, position: int, group: Group) -> None:
        reward = reward_of(self._pool.reward, group.prompt.task)
        parameters, size = inspect.signature(reward).parameters, len(group.rollouts)
        step = size if "texts" in parameters else 1
        parts = [range(first, first + step) for first in range(0, size, step)]
        submit = self._pool.submit
        jobs = [(part, submit(_job(group, part, parameters))) for part in parts]
        self._groups[position] = group, jobs

    @property
    def jobs(self) -> "list[Future[Outcome]]":
        return [job for _, jobs in self._groups.values() for _, job in jobs]

    def scores(self) -> Scores:
        """Scores of all groups by their positions, after `total_timeout_s` at most. Raises
        `RewardsFailed`."""
        done, late = wait(self.jobs, self._pool.total_timeout_s, FIRST_EXCEPTION)
        for job in done:
            job.result()
        self._pool.abandon(late)
        counts: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        scored = [self._scored(position, late, counts) for position in sorted(self._groups)]
        rewards, parts, failure = zip(*scored, strict=True) if scored else ((), (), ())
        count = sum(map(len, rewards))
        last = next(filter(None, reversed(failure)), "")
        missing = sum(reward is None for group in rewards for reward in group)
        if missing > MAX_MISSING * count or count and counts.total() == count:
            raise RewardsFailed(f"{counts.total()} of {count} rewards failed, the last: {last}")
        if last:
            logger.warning("%d rewards failed, the last: %s", counts.total(), last)
        return Scores(rewards, parts, **counts)

    def _scored(
        self, position: int, late: set[Future[Outcome]], counts: Counter[str]
    ) -> tuple[Rewards, tuple[Mapping[str, float], ...], str]:
        """Rewards, sub-scores and last failure of a group whose jobs are done; counts failures."""
        group, jobs = self._groups[position]
        prompt, size = group.prompt, len(group.rollouts)
        rewards: list[float | None] = [None] * size
        failure = ""
        parts: list[Mapping[str, float]] = [{}] * size
        for samples, job in jobs:
            over = job in late
            kind, value = ("late", "the step's time is over") if over else job.result()
            if kind == "reward" and len(value) != len(samples):
                kind, value = "errors", f"{len(value)} rewards for {len(samples)} responses"
            if kind == "reward":
                for sample, (reward, part) in zip(samples, value, strict=True):
                    rewards[sample], parts[sample] = reward, part
                    if reward is None:
                        failure = f"prompt {prompt.task}/{prompt.id}: errors: no reward"
                        counts["errors"] += 1
                continue
            failure = f"prompt {prompt.task}/{prompt.id}: {kind}: {value}"
            counts[kind] += len(samples)
            # Of a call for a whole group, it is not known which response is to blame.
            if kind in _BLAMED and len(samples) == 1:
                rewards[samples[0]] = self._pool.lowest.get(prompt.task, 0.0)
        return tuple(rewards), tuple(parts), failure


def names_of_call(parameters: Mapping[str, Any]) -> Names:
    """How a reward with these parameters is called."""
    if "texts" in parameters:
        return ("prompts", "texts"), "finish_reasons"
    return ("prompt", "text"), "finish_reason"


def _job(group: Group, samples: range, parameters: Mapping[str, Any]) -> Job:
    prompt, rollouts = group.prompt, [group.rollouts[sample] for sample in samples]
    texts: Any = [rollout.text for rollout in rollouts]
    reasons: Any = [rollout.finish_reason for rollout in rollouts]
    prompts: Any = [prompt] * len(rollouts)
    values, optional = names_of_call(parameters)
    if values == ("prompt", "text"):
        (prompts,), (texts,), (reasons,) = prompts, texts, reasons
    return prompt.task, (prompts, texts), {optional: reasons} if optional in parameters else {}
